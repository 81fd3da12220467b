"""Masking strategies: each splits the tokens, depends on the seed alone, samples as it should."""

import pytest
import torch
from material import close, random_clip, small
from tiny import randomize
from torch import Tensor, nn
from torch.func import functional_call

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE, sample_ids
from adamae.model.blocks import Block
from adamae.model.config import ModelConfig
from adamae.model.masking import Mask, make_masking
from adamae.model.registry import MASKS


def sample(config: ModelConfig, seed: int = 0, batch_size: int = 8) -> Mask:
    torch.manual_seed(0)
    strategy = make_masking(config).eval()
    tokens = None
    if strategy.needs_tokens:
        tokens = torch.randn(batch_size, config.num_tokens, config.dimensions.encoder_width)
    return strategy(random_clip(config, batch_size), tokens, seed, 0)


@pytest.mark.parametrize("masking", MASKS)
@pytest.mark.parametrize("mask_ratio", [0.5, 0.75])
def test_every_strategy_splits_all_tokens(masking: str, mask_ratio: float) -> None:
    config = small(masking=masking, mask_ratio=mask_ratio, num_frames=8)
    first = sample(config)
    assert first.visible_ids.shape == (8, config.num_visible)
    both = torch.cat((first.visible_ids, first.masked_ids), dim=1)
    assert torch.equal(both.sort().values, torch.arange(config.num_tokens).expand(8, -1))
    for ids in (first.visible_ids, first.masked_ids):
        assert ids.dtype == torch.int64
        assert (ids.diff() > 0).all()
    assert (first.log_probs is not None) == (masking in ("adaptive", "motion"))
    assert torch.equal(first.visible_ids, sample(config).visible_ids)
    assert not torch.equal(first.visible_ids, sample(config, seed=1).visible_ids)
    assert len(first.visible_ids.unique(dim=0)) > 1


def test_half_of_what_motion_share_shows_is_of_the_fifth_that_changes_most() -> None:
    config = small(masking="motion-share", mask_ratio=0.75, num_frames=8)
    motion = make_masking(config).logits(random_clip(config, 8), None)
    # The fifth of the tokens that changes most.
    moving = motion.argsort(dim=1, descending=True)[:, : config.num_tokens // 5]
    visible = sample(config).visible_ids
    is_moving = (visible[:, :, None] == moving[:, None]).any(dim=2)
    assert (is_moving.sum(dim=1) == config.num_visible // 2).all()


@pytest.mark.parametrize("changes", [{}, {"sampler_depth": 2}, {"activation_checkpointing": True}])
def test_masks_in_training_do_not_depend_on_how_clips_are_batched(changes: dict) -> None:
    config = small(**changes)
    model = AdaMAE(config).train()
    randomize(model)
    # More clips than are recomputed together.
    clip = random_clip(config, 12)
    whole = model(clip, 7, 100)
    for size in (1, 4, 10):
        for first in range(0, 12, size):
            part = model(clip[first : first + size], 7, 100 + first)
            assert torch.equal(part.visible_ids, whole.visible_ids[first : first + size])
            close(part.log_probs, whole.log_probs[first : first + size])
    # Without dropout these are others.
    assert not torch.allclose(model.eval()(clip, 7, 100).log_probs, whole.log_probs, atol=1e-3)


def test_tubes_and_frames_are_kept_whole() -> None:
    # Four token frames of 16 tokens.
    visible = sample(small(masking="tube", num_frames=8)).visible_ids.view(8, 4, -1)
    assert torch.equal(visible % 16, (visible[:, :1] % 16).expand_as(visible))
    assert torch.equal(visible // 16, torch.arange(4)[None, :, None].expand_as(visible))
    visible = sample(small(masking="frame", num_frames=8)).visible_ids
    assert torch.equal(visible % 16, torch.arange(16).expand(8, -1))
    assert (visible // 16 == visible[:, :1] // 16).all()


@pytest.mark.parametrize(
    ("masking", "mask_ratio", "count"),
    [
        # The ratios of Table 1 (b).
        ("adaptive", 0.98, 31),
        ("adaptive", 0.95, 78),
        ("adaptive", 0.9, 156),
        ("adaptive", 0.85, 235),
        ("adaptive", 0.8, 313),
        ("random", 0.75, 392),
        # Whole tubes of 8 tokens: 9 of 196.
        ("tube", 0.95, 72),
        ("tube", 0.75, 392),
        ("frame", 0.875, 196),
    ],
)
def test_number_of_visible_tokens(masking: str, mask_ratio: float, count: int) -> None:
    assert ModelConfig(masking=masking, mask_ratio=mask_ratio).num_visible == count


def encoder_layer(block: Block, x: Tensor) -> Tensor:
    """Run PyTorch's own transformer layer on x, with the weights of a sampler's block."""
    layer = nn.TransformerEncoderLayer(
        48,
        8,
        192,
        dropout=0,
        activation="gelu",
        layer_norm_eps=1e-5,
        batch_first=True,
        norm_first=True,
    )
    renamed = {
        "attn.qkv.weight": "self_attn.in_proj_weight",
        "attn.proj": "self_attn.out_proj",
        "mlp.fc1": "linear1",
        "mlp.fc2": "linear2",
    }
    weights = {"self_attn.in_proj_bias": torch.zeros(144)}
    for own_name, value in block.named_parameters():
        name = own_name
        for part, replacement in renamed.items():
            name = name.replace(part, replacement)
        weights[name] = value
    return functional_call(layer, weights, x)


@pytest.mark.parametrize("changes", [{}, {"sampler_depth": 2}, {"sampler": "mlp"}], ids=str)
def test_the_sampler_and_its_loss_are_the_papers(changes: dict) -> None:
    """arXiv 2211.09120 §3.2 and §3.3.

    The block is that of the authors' code: without a bias of queries, keys or values.
    """
    config = small(sampling_loss_weight=0.5, **changes)
    model = AdaMAE(config).eval()
    clip = random_clip(config)
    randomize(model)
    output = model(clip, 0, 0)
    sampler = model.token_sampler
    x = model.tokenizer(clip).detach() + sampler.positions
    for part in sampler.body:
        if isinstance(part, Block):
            x = encoder_layer(part, x)
        else:
            x = nn.functional.linear(x, part.weight, part.bias)
    logits = nn.functional.linear(x, sampler.logit.weight, sampler.logit.bias)[..., 0]
    log_probs = logits.log_softmax(dim=-1)
    loss = -(log_probs.gather(1, output.masked_ids) * output.loss_per_token.detach()).mean()
    close(output.log_probs.exp(), log_probs.exp())
    close(output.sampling_loss, loss)
    close(output.loss, output.reconstruction_loss + 0.5 * loss)
    parameters = dict(sampler.named_parameters())
    expected = torch.autograd.grad(loss, parameters.values(), retain_graph=True)
    gradients = torch.autograd.grad(output.sampling_loss, parameters.values())
    for name, gradient, expected_gradient in zip(parameters, gradients, expected, strict=True):
        # A bias shared by all logits does not change a softmax: its gradient is rounding at most.
        if name != "logit.bias":
            close(gradient, expected_gradient, name)


def test_motion_masking_shows_what_moves_and_trains_no_sampler() -> None:
    clip = torch.full((1, 6, 16, 16, 3), 100, dtype=torch.uint8)
    # Darker for one token frame, in one patch.
    clip[:, 2:4, :8, 8:] = 60
    strategy = make_masking(small(masking="motion", num_frames=6, image_size=16))
    logits = strategy.logits(clip, None).view(3, 2, 2)
    torch.testing.assert_close(logits[:, 0, 1], torch.tensor([40.0, 40.0, 40.0]).log1p())
    assert logits[:, 0, 0].tolist() == logits[:, 1, 1].tolist() == [0, 0, 0]
    config = small(masking="motion")
    # The same clip four times, side by side, in the shape of this model.
    output = AdaMAE(config)(clip[:, :4].repeat(1, 1, 2, 2, 1), 0, 0)
    assert output.sampling_loss == 0
    probabilities = output.log_probs[0].exp()
    assert probabilities.max() > 10 * probabilities.min()
    sentence = r"a clip of 2 frames in tubelets of 2 has only one: raise model\.num_frames"
    with pytest.raises(InputError, match=sentence):
        AdaMAE(small(masking="motion", num_frames=2))


def test_the_decoder_predicts_a_fraction_in_training_and_all_in_evaluation() -> None:
    config = small(decoder_share=0.5)
    model = AdaMAE(config)
    clip = random_clip(config)
    num_masked = config.num_tokens - config.num_visible
    assert model.eval()(clip, 0, 0).masked_ids.shape[1] == num_masked
    output = model.train()(clip, 0, 0)
    assert config.num_reconstructed == num_masked // 2
    assert output.masked_ids.shape[1] == num_masked // 2
    assert output.pred.shape[1] == num_masked // 2
    for masked, visible in zip(output.masked_ids, output.visible_ids, strict=True):
        assert not set(masked.tolist()) & set(visible.tolist())
        assert (masked.diff() > 0).all()
    output.loss.backward()
    assert torch.equal(model(clip, 0, 0).masked_ids, output.masked_ids)
    assert not torch.equal(model(clip, 1, 0).masked_ids, output.masked_ids)


def test_the_loss_of_a_random_fraction_is_an_unbiased_estimate_of_the_whole() -> None:
    config = small(masking="random", decoder_share=0.25)
    num_samples = 600
    model = AdaMAE(config)
    clip = random_clip(config, batch_size=1)
    with torch.no_grad():
        whole = model.eval()(clip, 3, 0)
    masked_ids = whole.masked_ids.expand(num_samples, -1)
    chosen = sample_ids(masked_ids, config.num_reconstructed, 7, 0)
    errors = torch.zeros(config.num_tokens)
    errors[whole.masked_ids[0]] = whole.loss_per_token[0]
    estimates = errors[chosen].mean(dim=1)
    standard_error = estimates.std() / num_samples**0.5
    assert (estimates.mean() - whole.reconstruction_loss).abs() < 4 * standard_error

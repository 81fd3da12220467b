import math

import pytest
import torch
from material import random_clip, small

from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.token_samplers import Draw, build_sampler
from model.tokenizer import position_table


def draw(config: ModelConfig, seed: int = 0) -> Draw:
    tokens = torch.randn(8, config.num_tokens, config.dimensions.encoder_width)
    return build_sampler(config).eval()(tokens, seed, 0)


@pytest.mark.parametrize("masking", ["adaptive", "random", "tube", "frame"])
@pytest.mark.parametrize("mask_ratio", [0.5, 0.75])
def test_every_strategy_splits_all_tokens(masking, mask_ratio) -> None:
    config = small(masking=masking, mask_ratio=mask_ratio, num_frames=8)
    first, again, other = draw(config), draw(config), draw(config, seed=1)
    assert first.visible_ids.shape == (8, config.num_visible)
    both = torch.cat((first.visible_ids, first.masked_ids), dim=1)
    assert torch.equal(both.sort().values, torch.arange(config.num_tokens).expand(8, -1))
    for ids in (first.visible_ids, first.masked_ids):
        assert ids.dtype == torch.int64
        assert (ids.diff() > 0).all()
    if masking != "adaptive":  # whose weights are drawn anew here
        assert torch.equal(first.visible_ids, again.visible_ids)
        assert not torch.equal(first.visible_ids, other.visible_ids)
        assert len(first.visible_ids.unique(dim=0)) > 1


def test_a_tube_keeps_its_place_over_time() -> None:
    config = small(masking="tube", num_frames=8)
    visible = draw(config).visible_ids.view(8, 4, -1)
    assert torch.equal(visible % 16, (visible[:, :1] % 16).expand_as(visible))
    assert torch.equal(visible // 16, torch.arange(4)[None, :, None].expand_as(visible))


def test_frames_are_kept_whole() -> None:
    config = small(masking="frame", num_frames=8)
    visible = draw(config).visible_ids
    assert torch.equal(visible % 16, torch.arange(16).expand(8, -1))
    assert (visible // 16 == visible[:, :1] // 16).all()


@pytest.mark.parametrize(
    ("masking", "mask_ratio", "count"),
    [
        ("adaptive", 0.98, 31),
        ("adaptive", 0.95, 78),
        ("adaptive", 0.90, 156),
        ("adaptive", 0.85, 235),
        ("adaptive", 0.80, 313),
        ("random", 0.75, 392),
        ("tube", 0.95, 72),
        ("tube", 0.75, 392),
        ("frame", 0.875, 196),
    ],
)
def test_number_of_visible_tokens(masking, mask_ratio, count) -> None:
    assert ModelConfig(masking=masking, mask_ratio=mask_ratio).num_visible == count


def test_tokens_are_drawn_as_often_as_their_probabilities_say() -> None:
    """One of 32 drawn 4,000 times, chi-square against P; a biased logit would show at once."""
    scipy_stats = pytest.importorskip("scipy.stats")
    config = small(mask_ratio=31 / 32)
    sampler = build_sampler(config).eval()
    with torch.no_grad():
        sampler.logit.weight.mul_(3)
        tokens = torch.randn(1, 32, 48, generator=torch.Generator().manual_seed(0)).expand(4000, -1, -1)
        result = sampler(tokens, 5, 0)
    counts = torch.bincount(result.visible_ids[:, 0], minlength=32).double()
    expected = result.log_probs[0].double().softmax(0) * 4000
    assert expected.max() > 2 * expected.min()
    assert scipy_stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-3


def test_adaptive_draws_follow_what_is_seen() -> None:
    config = small()
    sampler = build_sampler(config).eval()
    tokens = torch.randn(1, 32, 48, generator=torch.Generator().manual_seed(0)).repeat(2, 1, 1)
    tokens[1] *= -1
    log_probs = sampler(tokens, 0, 0).log_probs
    assert not torch.allclose(log_probs[0], log_probs[1])
    torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(2))


@pytest.mark.parametrize("changes", [{"sampler": "mlp"}, {"sampler_depth": 2}, {"sampler_width": 24}], ids=str)
def test_table_1f(changes) -> None:
    config = small(**changes)
    model = AdaMAE(config)
    model(random_clip(config), 0, 0).loss.backward()
    for name, value in model.token_sampler.named_parameters():
        assert value.grad is not None, name


def test_an_mlp_sampler_looks_at_each_token_alone() -> None:
    tokens = torch.randn(2, 32, 48)
    tokens[1, 1:] = tokens[0, 1:]  # the clips differ in their first token only
    for kind, alone in (("mlp", True), ("mha", False)):
        sampler = build_sampler(small(sampler=kind)).eval()
        log_probs = sampler(tokens, 0, 0).log_probs
        differences = (log_probs - log_probs[:, 1:2])[:, 1:]
        assert torch.allclose(differences[0], differences[1], atol=1e-5) == alone


def test_the_samplers_block_is_as_specified() -> None:
    (block,) = AdaMAE(ModelConfig(size="tiny")).token_sampler.body[:1]
    assert (block.norm1.eps, block.norm2.eps) == (1e-5, 1e-5)
    assert (block.attn.num_heads, block.attn.proj_drop.p, block.mlp.drop2.p) == (8, 0.1, 0.1)
    assert block.attn.q_bias is None


def test_sampler_dropout_acts_in_training_only() -> None:
    tokens = torch.randn(2, 32, 48)
    sampler = build_sampler(small())
    assert not torch.equal(sampler(tokens, 0, 0).log_probs, sampler(tokens, 0, 0).log_probs)
    sampler.eval()
    assert torch.equal(sampler(tokens, 0, 0).log_probs, sampler(tokens, 0, 0).log_probs)


def test_flat_positions_are_vaswanis() -> None:
    table = position_table("flat-1d", (2, 3, 4), 16)
    assert table.shape == (24, 16)
    for place in (0, 5, 23):
        for channel in range(16):
            angle = place / 10000 ** (2 * (channel // 2) / 16)
            expected = math.sin(angle) if channel % 2 == 0 else math.cos(angle)
            assert table[place, channel].item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("width", [16, 96, 384])
def test_separable_positions_tell_axes_apart(width) -> None:
    table = position_table("separable-3d", (2, 3, 4), width).view(2, 3, 4, width)
    assert table.flatten(0, 2).unique(dim=0).shape == (24, width)
    for axis in range(3):
        # Along one axis only its own channels change, and these do not depend on the other two.
        step = table.diff(dim=axis)
        others = [other for other in range(3) if other != axis]
        assert torch.equal(step, step.select(others[1], 0).unsqueeze(others[1]).expand_as(step))
        assert (step.flatten(0, 2).abs().amax(0) > 0).sum() <= width // 2


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"mask_ratio": 1.0}, "model.mask_ratio is 1.0"),
        ({"mask_ratio": 0.0}, "model.mask_ratio is 0.0"),
        ({"sampling_baseline": 1.0}, "model.sampling_baseline is 1.0"),
        ({"mask_ratio": 0.999}, "leaves 0 of 32 tokens visible"),
        ({"masking": "frame", "mask_ratio": 0.75}, "leaves 0 of 32 tokens visible under frame masking"),
        ({"num_frames": 5}, "model.num_frames (5) is not a multiple of model.tubelet_size (2)"),
        ({"image_size": 30}, "model.image_size (30) is not a multiple of model.patch_size (8)"),
        ({"decoder_depth": 0}, "model.decoder_depth is 0"),
        ({"encoder_heads": 5}, "change model.encoder_width"),
        ({"sampler_width": 20}, "change model.sampler_width"),
        ({"sampler": "mlp", "sampler_depth": 2}, "model.sampler_depth is 2"),
    ],
    ids=str,
)
def test_bad_configurations(changes, sentence) -> None:
    with pytest.raises(InputError) as error:
        small(**changes)
    assert sentence in str(error.value)

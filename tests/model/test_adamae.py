"""The whole model: what each part sees, what each loss trains, what changes no value."""

import pytest
import torch
from material import close, give_ids, random_clip, random_ids, small
from tiny import randomize
from torch import Tensor

from adamae.model.adamae import AdaMAE, Output
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.training.parallelize import compile_in_place

MASKINGS = ["adaptive", "random", "tube", "frame"]
SAMPLER = "token_sampler."


def gradient_names(model: torch.nn.Module, loss: Tensor) -> set[str]:
    """Return the names of the parameters that `loss` changes."""
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    names = set()
    for name, value in model.named_parameters():
        if value.grad is not None and value.grad.any():
            names.add(name)
    return names


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("detach", [True, False])
def test_masked_pixels_do_not_reach_the_encoder(masking: str, detach: bool) -> None:
    config = small(masking=masking, detach_sampler_input=detach, mask_ratio=0.5)
    model = AdaMAE(config).eval()
    features = []
    model.encoder.register_forward_hook(lambda module, inputs, output: features.append(output))
    clip = random_clip(config)
    first = model(clip, 3, 0)
    if masking == "adaptive":
        # The sampler does see all pixels: keep its mask.
        give_ids(model, first.visible_ids, first.masked_ids)

    # Tokens are 2 frames of 8 × 8 pixels.
    is_masked = torch.zeros(2, config.num_tokens).scatter(1, first.masked_ids, 1)
    is_masked = is_masked.view(2, *config.grid, 1).bool()
    is_masked = is_masked.repeat_interleave(2, 1).repeat_interleave(8, 2).repeat_interleave(8, 3)
    changed_clip = torch.where(is_masked, 255 - clip, clip)
    assert not torch.equal(changed_clip, clip)
    second = model(changed_clip, 3, 0)
    assert torch.equal(features[0], features[1])
    assert torch.equal(first.pred, second.pred)
    assert not torch.equal(first.loss_per_token, second.loss_per_token)

    # Had visible pixels changed, too, the encoder would have seen it.
    model(255 - clip, 3, 0)
    assert not torch.equal(features[0], features[2])


@pytest.mark.parametrize("checkpointing", [True, False])
def test_tokens_of_a_cross_decoder_are_predicted_by_themselves(checkpointing: bool) -> None:
    config = small(decoder_attention="cross", activation_checkpointing=checkpointing)
    model = AdaMAE(config)
    randomize(model)
    visible, masked = random_ids(config)
    features = torch.randn(2, config.num_visible, 48)
    pred = model.decoder(features, visible, masked)
    close(model.decoder(features, visible, masked[:, 3:7]), pred[:, 3:7])
    # They do depend on the visible ones: here on those of the other clip.
    assert not torch.allclose(model.decoder(features.flip(0), visible, masked), pred)


@pytest.mark.parametrize("decoder", ["self", "cross"])
@pytest.mark.parametrize("detach", [True, False])
def test_gradients_reach_only_what_they_should(detach: bool, decoder: str) -> None:
    config = small(detach_sampler_input=detach, decoder_attention=decoder)
    model = AdaMAE(config)
    randomize(model)
    output = model(random_clip(config), 0, 0)
    everything = {name for name, _ in model.named_parameters()}
    sampler = {name for name in everything if name.startswith(SAMPLER)}
    tokenizer = {name for name in everything if name.startswith("tokenizer.")}
    # A bias shared by all logits does not change a softmax: its gradient is rounding at most.
    without_gradient = {"token_sampler.logit.bias"}

    expected = sampler if detach else sampler | tokenizer
    by_sampling = gradient_names(model, output.sampling_loss)
    assert by_sampling - without_gradient == expected - without_gradient
    assert gradient_names(model, output.reconstruction_loss) == everything - sampler
    assert gradient_names(model, output.loss) >= everything - without_gradient


def test_in_bf16_losses_stay_fp32_and_gradients_are_close() -> None:
    """Also where they are sums over thousands of tokens, as those of the decoder's LayerNorms."""
    config = small(num_frames=8, image_size=112)
    model = AdaMAE(config).eval()
    randomize(model)
    give_ids(model, *random_ids(config))
    dtypes = []
    attention = model.token_sampler.body[0].attn
    attention.register_forward_hook(lambda module, x, y: dtypes.append(y.dtype))

    def run(in_bf16: bool) -> tuple[Output, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            output = model(random_clip(config), 0, 0)
        parameters = {
            name: p for name, p in model.named_parameters() if not name.startswith(SAMPLER)
        }
        gradients = torch.autograd.grad(output.reconstruction_loss, parameters.values())
        return output, dict(zip(parameters, gradients, strict=True))

    plain, exact = run(in_bf16=False)
    output, gradients = run(in_bf16=True)
    assert dtypes == [torch.float32, torch.bfloat16]
    assert output.pred.dtype == torch.bfloat16
    for name in ("loss", "reconstruction_loss", "sampling_loss", "loss_per_token", "log_probs"):
        assert getattr(output, name).dtype == torch.float32, name
    torch.testing.assert_close(output.loss, plain.loss, rtol=0.02, atol=0)
    for name, rounded in gradients.items():
        assert rounded.dtype == torch.float32
        error = (rounded - exact[name]).norm() / exact[name].norm()
        assert error < 0.06, (name, error)


def test_clips_have_the_same_masks_in_any_batch() -> None:
    config = small()
    model = AdaMAE(config).eval()
    clip = random_clip(config, batch_size=4)
    together = model(clip, 7, 100)
    for row in range(4):
        alone = model(clip[row : row + 1], 7, 100 + row)
        assert torch.equal(alone.visible_ids[0], together.visible_ids[row])
        torch.testing.assert_close(alone.pred[0], together.pred[row], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("num_frames", "image_size", "tubelet_size", "patch_size"),
    [(8, 112, 2, 16), (64, 112, 2, 16), (8, 224, 4, 32), (2, 448, 1, 32), (6, 96, 3, 8)],
)
@pytest.mark.parametrize("positions", ["flat-1d", "separable-3d"])
def test_other_clip_shapes(
    num_frames: int, image_size: int, tubelet_size: int, patch_size: int, positions: str
) -> None:
    config = small(
        num_frames=num_frames,
        image_size=image_size,
        tubelet_size=tubelet_size,
        patch_size=patch_size,
        positions=positions,
    )
    model = AdaMAE(config)
    output = model(random_clip(config, batch_size=1), 0, 0)
    output.loss.backward()
    num_tokens = (num_frames // tubelet_size) * (image_size // patch_size) ** 2
    num_masked = num_tokens - num_tokens // 4
    assert output.log_probs.shape == (1, num_tokens)
    assert output.pred.shape == (1, num_masked, 3 * tubelet_size * patch_size**2)
    assert model.encode(random_clip(config, batch_size=1)).tokens.shape == (1, num_tokens, 48)


# Half a minute of tracing.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("masking", "checkpointing"), [("adaptive", False), ("adaptive", True), ("tube", False)]
)
def test_compiled_whole_and_once_it_learns_as_the_plain_model(
    masking: str, checkpointing: bool
) -> None:
    """Though the compiled backward pass is given less, and makes the rest again."""
    torch._dynamo.reset()
    config = small(
        masking=masking, activation_checkpointing=checkpointing, detach_sampler_input=False
    )
    model = AdaMAE(config).eval()
    randomize(model)

    def step(seed: int) -> tuple[Output, list[Tensor]]:
        output = model(random_clip(model.config), torch.tensor(seed), torch.tensor(10 * seed))
        return output, list(torch.autograd.grad(output.loss, list(model.parameters())))

    expected_steps = {seed: step(seed) for seed in (1, 2)}
    compile_in_place(model, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, (expected, expected_gradients) in expected_steps.items():
            output, gradients = step(seed)
            assert torch.equal(output.visible_ids, expected.visible_ids)
            torch.testing.assert_close(output.loss, expected.loss)
            torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masking", ["adaptive", "tube"])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(
    masking: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(
        checkpointing: bool, clips_at_once: int, train: bool
    ) -> tuple[Tensor, list[Tensor], int]:
        """Return loss, gradients, and how many numbers are kept for the backward pass."""
        monkeypatch.setattr("adamae.model.masking.CLIPS_AT_ONCE", clips_at_once)
        torch.manual_seed(0)
        config = small(masking=masking, activation_checkpointing=checkpointing, decoder_depth=3)
        model = AdaMAE(config).train(train)
        randomize(model)
        sizes: list[int] = []

        def keep(x: Tensor) -> Tensor:
            sizes.append(x.numel())
            return x

        with (
            torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x),
            torch.autocast("cpu", torch.bfloat16, enabled=train),
        ):
            loss = model(random_clip(config, batch_size=3), 0, 0).loss
        loss.backward()
        return loss, [value.grad for value in model.parameters()], sum(sizes)

    # In one go, dropout is the same.
    expected, expected_gradients, plain_size = step(False, 8, train=True)
    loss, gradients, size = step(True, 8, train=True)
    assert size < 0.75 * plain_size
    assert torch.equal(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=0, atol=0)
    # Two clips, then one.
    expected, expected_gradients, _ = step(False, 8, train=False)
    loss, gradients, _ = step(True, 2, train=False)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(gradients, expected_gradients, rtol=1e-4, atol=1e-5)


def test_parameters_and_their_initialization() -> None:
    """The paper's model has 102.5 M, of which 94.2 M are not the sampler's."""
    with torch.device("meta"):
        adaptive = AdaMAE(ModelConfig())
        tube = AdaMAE(ModelConfig(masking="tube"))
    assert sum(value.numel() for value in adaptive.parameters()) == 102_501_505
    assert sum(value.numel() for value in tube.parameters()) == 94_210_944
    model = AdaMAE(ModelConfig(size="tiny"))
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}, (
        "fixed positions are not saved"
    )
    for name, value in model.named_parameters():
        if name.endswith("bias") or name == "token_sampler.positions":
            assert not value.any(), name
        elif "norm" in name:
            assert (value == 1).all(), name
        elif name == "decoder.mask_token":
            assert 0.01 < value.std() < 0.03
        else:
            # Xavier-uniform.
            bound = (6 / sum(value.shape)) ** 0.5
            assert 0.9 * bound < value.abs().max() <= bound, name


def test_drop_path_acts_and_grows_with_depth() -> None:
    config = small(encoder_depth=3)
    classifier = VideoClassifier(config, num_classes=5, drop_path=0.4)
    clip = random_clip(config)
    assert [block.drop_path.p for block in classifier.encoder.blocks] == [0, 0.2, 0.4]
    assert not torch.equal(classifier.features(clip), classifier.features(clip))

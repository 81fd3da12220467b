import pytest
import torch
from material import close, give_ids, random_clip, random_ids, randomize, small
from torch import Tensor

from adamae.model.adamae import AdaMAE, Output
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.training.parallelize import compile_in_place

MASKINGS = ["adaptive", "random", "tube", "frame"]
SAMPLER = "token_sampler."


def gradient_names(model: torch.nn.Module, loss: Tensor) -> set[str]:
    """The parameters that `loss` moves."""
    model.zero_grad(set_to_none=True)
    loss.backward(retain_graph=True)
    return {
        name
        for name, value in model.named_parameters()
        if value.grad is not None and value.grad.any()
    }


@pytest.mark.parametrize("masking", MASKINGS)
@pytest.mark.parametrize("detach", [True, False])
def test_hidden_pixels_do_not_reach_the_encoder(masking, detach) -> None:
    config = small(masking=masking, detach_sampler_input=detach, mask_ratio=0.5)
    model = AdaMAE(config).eval()
    features = []
    model.encoder.register_forward_hook(lambda module, inputs, output: features.append(output))
    clip = random_clip(config)
    first = model(clip, 3, 0)
    if masking == "adaptive":  # the sampler does see all pixels: keep its mask
        give_ids(model, first.visible_ids, first.masked_ids)

    is_masked = (
        torch.zeros(2, config.num_tokens).scatter(1, first.masked_ids, 1).view(2, *config.grid, 1)
    )
    is_masked = (
        is_masked.repeat_interleave(2, 1).repeat_interleave(8, 2).repeat_interleave(8, 3).bool()
    )
    other = torch.where(is_masked, 255 - clip, clip)
    assert not torch.equal(other, clip)
    second = model(other, 3, 0)
    assert torch.equal(features[0], features[1])
    assert torch.equal(first.pred, second.pred)
    assert not torch.equal(first.loss_per_token, second.loss_per_token)

    model(255 - clip, 3, 0)
    assert not torch.equal(features[0], features[2])


@pytest.mark.parametrize("checkpointing", [True, False])
def test_tokens_of_a_cross_decoder_are_predicted_by_themselves(checkpointing) -> None:
    config = small(decoder_attention="cross", activation_checkpointing=checkpointing)
    model = AdaMAE(config)
    randomize(model)
    visible, masked = random_ids(config)
    features = torch.randn(2, config.num_visible, 48)
    pred = model.decoder(features, visible, masked)
    close(model.decoder(features, visible, masked[:, 3:7]), pred[:, 3:7])
    assert not torch.allclose(model.decoder(features.flip(0), visible, masked), pred)


@pytest.mark.parametrize("decoder", ["self", "cross"])
@pytest.mark.parametrize("detach", [True, False])
def test_gradients_reach_only_what_they_should(detach, decoder) -> None:
    config = small(detach_sampler_input=detach, decoder_attention=decoder)
    model = AdaMAE(config)
    randomize(model)
    output = model(random_clip(config), 0, 0)
    everything = {name for name, _ in model.named_parameters()}
    sampler = {name for name in everything if name.startswith(SAMPLER)}
    tokenizer = {name for name in everything if name.startswith("tokenizer.")}

    by_sampling = gradient_names(model, output.sampling_loss)
    # A bias shared by all logits does not change a softmax: its gradient is rounding at most.
    assert by_sampling - {"token_sampler.logit.bias"} == (
        sampler - {"token_sampler.logit.bias"} | (set() if detach else tokenizer)
    )
    assert gradient_names(model, output.reconstruction_loss) == everything - sampler
    assert gradient_names(model, output.loss) >= everything - {"token_sampler.logit.bias"}


def test_in_bf16_losses_stay_fp32_and_gradients_are_close() -> None:
    """Also where they are sums over thousands of tokens, as those of the decoder's LayerNorms."""
    config = small(num_frames=8, image_size=112)
    model = AdaMAE(config).eval()
    randomize(model)
    give_ids(model, *random_ids(config))
    dtypes = []
    model.token_sampler.body[0].attn.register_forward_hook(
        lambda module, x, y: dtypes.append(y.dtype)
    )

    def run(in_bf16: bool) -> tuple[Output, dict[str, Tensor]]:
        with torch.autocast("cpu", torch.bfloat16, enabled=in_bf16):
            output = model(random_clip(config), 0, 0)
        parameters = {
            name: p for name, p in model.named_parameters() if not name.startswith(SAMPLER)
        }
        gradients = torch.autograd.grad(output.reconstruction_loss, parameters.values())
        return output, dict(zip(parameters, gradients, strict=True))

    (plain, exact), (output, gradients) = run(False), run(True)
    assert dtypes == [torch.float32, torch.bfloat16]
    assert output.pred.dtype == torch.bfloat16
    for name in ("loss", "reconstruction_loss", "sampling_loss", "loss_per_token", "log_probs"):
        assert getattr(output, name).dtype == torch.float32, name
    torch.testing.assert_close(output.loss, plain.loss, rtol=0.02, atol=0)
    for name, rounded in gradients.items():
        assert rounded.dtype == torch.float32
        error = (rounded - exact[name]).norm() / exact[name].norm()
        assert error < 0.06, (name, error)


def test_clips_draw_the_same_in_any_batch() -> None:
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
def test_other_clip_shapes(num_frames, image_size, tubelet_size, patch_size, positions) -> None:
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
    assert output.log_probs.shape == (1, num_tokens)
    assert output.pred.shape == (1, num_tokens - num_tokens // 4, 3 * tubelet_size * patch_size**2)
    assert model.encode(random_clip(config, batch_size=1)).tokens.shape == (1, num_tokens, 48)


@pytest.mark.slow  # half a minute of tracing
@pytest.mark.parametrize(
    ("masking", "checkpointing"), [("adaptive", False), ("adaptive", True), ("tube", False)]
)
def test_compiled_whole_and_once_it_learns_as_the_plain_model(masking, checkpointing) -> None:
    """Though the compiled backward pass is given less, and makes the rest again."""
    torch._dynamo.reset()
    model = AdaMAE(
        small(masking=masking, activation_checkpointing=checkpointing, detach_sampler_input=False)
    ).eval()
    randomize(model)

    def step(seed: int) -> tuple[Output, list[Tensor]]:
        output = model(random_clip(model.config), torch.tensor(seed), torch.tensor(10 * seed))
        return output, list(torch.autograd.grad(output.loss, list(model.parameters())))

    plain = step(1), step(2)
    compile_in_place(model, fullgraph=True, backend="aot_eager_decomp_partition")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for seed, (expected, gradients) in enumerate(plain, 1):
            output, found = step(seed)
            assert torch.equal(output.visible_ids, expected.visible_ids)
            torch.testing.assert_close(output.loss, expected.loss)
            torch.testing.assert_close(found, gradients, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("masking", ["adaptive", "tube"])
def test_activation_checkpointing_changes_neither_loss_nor_gradients(masking, monkeypatch) -> None:
    def step(
        checkpointing: bool, clips_at_once: int, train: bool
    ) -> tuple[Tensor, list[Tensor], int]:
        monkeypatch.setattr("adamae.model.masking.CLIPS_AT_ONCE", clips_at_once)
        torch.manual_seed(0)
        config = small(masking=masking, activation_checkpointing=checkpointing, decoder_depth=3)
        model = AdaMAE(config).train(train)
        randomize(model)
        kept: list[int] = []
        with (
            torch.autograd.graph.saved_tensors_hooks(
                lambda x: kept.append(x.numel()) or x, lambda x: x
            ),
            torch.autocast("cpu", torch.bfloat16, enabled=train),
        ):
            loss = model(random_clip(config, batch_size=3), 0, 0).loss
        loss.backward()
        return loss, [value.grad for value in model.parameters()], sum(kept)

    loss, gradients, kept = step(False, 8, train=True)
    again, other_gradients, less = step(True, 8, train=True)  # in one go dropout draws the same
    assert less < 0.75 * kept
    assert torch.equal(again, loss)
    torch.testing.assert_close(other_gradients, gradients, rtol=0, atol=0)
    loss, gradients, _ = step(False, 8, train=False)
    again, other_gradients, _ = step(True, 2, train=False)  # two clips, then one
    torch.testing.assert_close(again, loss)
    torch.testing.assert_close(other_gradients, gradients, rtol=1e-4, atol=1e-5)


def test_parameters_and_their_initialization() -> None:
    """The paper's 102.5 M, of which 94.2 M are not the sampler's."""
    with torch.device("meta"):
        adaptive, tube = AdaMAE(ModelConfig()), AdaMAE(ModelConfig(masking="tube"))
    counts = [sum(value.numel() for value in model.parameters()) for model in (adaptive, tube)]
    assert counts == [102_501_505, 94_210_944]
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
            bound = (6 / sum(value.shape)) ** 0.5  # Xavier-uniform
            assert 0.9 * bound < value.abs().max() <= bound, name


def test_drop_path_acts_and_grows_with_depth() -> None:
    config = small(encoder_depth=3)
    classifier, clip = VideoClassifier(config, num_classes=5, drop_path=0.4), random_clip(config)
    assert [block.drop_path.p for block in classifier.encoder.blocks] == [0, 0.2, 0.4]
    assert not torch.equal(classifier.features(clip), classifier.features(clip))

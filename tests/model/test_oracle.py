"""The model agrees with the paper's model and losses, restated here: values to 1e-5, and gradients.

The restatement shares no code with `model` or `kernels`: it is a few functions of a state dict in the authors' layout,
in double precision, with PyTorch's own operations.
"""

import math

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from material import close, random_clip, random_ids, randomize, small
from torch import Tensor

from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.weights.layouts import to_external

State = dict[str, Tensor]
MEAN, STD = (torch.tensor(x).double().view(3, 1, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
VARIANTS = [
    {},
    {"loss": "l1"},
    {"normalize_target": False},
    {"loss": "l1", "normalize_target": False},
    {"sampler": "mlp"},
    {"sampler_depth": 2},
    {"decoder_depth": 1},
    {"tubelet_size": 4, "num_frames": 8},
    {"masking": "random"},
    {"sampling_loss_weight": 2e-4},
]


def embed(state: State, name: str, clip: Tensor, config: ModelConfig) -> Tensor:
    pixels = (clip.movedim(4, 1).double() / 255 - MEAN) / STD
    step = (config.tubelet_size, config.patch_size, config.patch_size)
    return F.conv3d(pixels, state[name + "weight"], state[name + "bias"], step).flatten(2).mT


def linear(state: State, name: str, x: Tensor) -> Tensor:
    return F.linear(x, state[name + "weight"], state.get(name + "bias"))


def norm(state: State, name: str, x: Tensor, eps: float = 1e-6) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], state[name + "weight"], state[name + "bias"], eps)


def block(state: State, name: str, x: Tensor, heads: int, eps: float = 1e-6) -> Tensor:
    q, k, v = linear(state, name + "attn.qkv.", norm(state, name + "norm1.", x, eps)).chunk(3, dim=-1)
    if name + "attn.q_bias" in state:
        q, v = q + state[name + "attn.q_bias"], v + state[name + "attn.v_bias"]
    q, k, v = (rearrange(part, "b n (h d) -> b h n d", h=heads) for part in (q, k, v))
    scores = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(dim=-1)
    x = x + linear(state, name + "attn.proj.", rearrange(scores @ v, "b h n d -> b n (h d)"))
    hidden = F.gelu(linear(state, name + "mlp.fc1.", norm(state, name + "norm2.", x, eps)))
    return x + linear(state, name + "mlp.fc2.", hidden)


def blocks(state: State, name: str, x: Tensor, heads: int) -> Tensor:
    for i in range(count(state, name)):
        x = block(state, f"{name}{i}.", x, heads)
    return x


def count(state: State, prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})


def sine_table(tokens: int, width: int) -> Tensor:
    wave = {0: math.sin, 1: math.cos}
    rows = [[wave[c % 2](n / 10000 ** (2 * (c // 2) / width)) for c in range(width)] for n in range(tokens)]
    return torch.tensor(rows, dtype=torch.double)


def pick(x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([row[own] for row, own in zip(x, ids, strict=True)])


def sample_probabilities(state: State, tokens: Tensor) -> Tensor:
    x, name = tokens + state["encoder.pos_embed_probs"], "encoder.get_token_probs."
    last = count(state, name) - 1
    for i in range(last):  # a Linear is the MLP of Table 1 (f)
        is_mlp = f"{name}{i}.weight" in state
        x = linear(state, f"{name}{i}.", x) if is_mlp else block(state, f"{name}{i}.", x, 8, 1e-5)
    return linear(state, f"{name}{last}.", x)[..., 0].softmax(dim=-1)


def patch_targets(clip: Tensor, config: ModelConfig) -> Tensor:
    """[B, N, P], pixels in [0, 1]."""
    sizes = {"t": config.tubelet_size, "h": config.patch_size, "w": config.patch_size}
    patches = rearrange(clip.double() / 255, "b (T t) (H h) (W w) c -> b (T H W) (t h w) c", **sizes)
    if config.normalize_target:
        patches = (patches - patches.mean(dim=2, keepdim=True)) / (patches.std(dim=2, keepdim=True) + 1e-6)
    return patches.flatten(2)


def restated(
    state: State, clip: Tensor, visible: Tensor, masked: Tensor, config: ModelConfig
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return predictions, losses and sampling probabilities."""
    tokens, size = embed(state, "encoder.patch_embed.proj.", clip, config), config.dimensions
    x = pick(tokens + sine_table(tokens.shape[1], tokens.shape[2]), visible)
    x = norm(state, "encoder.norm.", blocks(state, "encoder.blocks.", x, size.encoder_heads))
    x = linear(state, "encoder_to_decoder.", x)
    table = sine_table(tokens.shape[1], x.shape[2]).expand(len(clip), -1, -1)
    x = torch.cat([x + pick(table, visible), state["mask_token"] + pick(table, masked)], dim=1)
    x = blocks(state, "decoder.blocks.", x, size.decoder_heads)[:, -masked.shape[1] :]
    pred = linear(state, "decoder.head.", norm(state, "decoder.norm.", x))
    residual = pred - pick(patch_targets(clip, config), masked)
    losses = (residual**2 if config.loss == "mse" else residual.abs()).mean(-1)
    adaptive = "encoder.pos_embed_probs" in state
    return pred, losses, sample_probabilities(state, tokens.detach()) if adaptive else None


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_values_and_gradients(changes, given_ids) -> None:
    config = small(**changes)
    model, clip = AdaMAE(config).eval(), random_clip(config)
    randomize(model)
    visible, masked = random_ids(config)
    given_ids(visible, masked)
    output = model(clip, 0, 0)
    output.loss.backward()
    layout = "adamae" if config.masking == "adaptive" else "videomae"
    external = to_external(model.state_dict(), layout, config.tubelet_size)
    state = {name: value.double().requires_grad_() for name, value in external.items()}
    pred, losses, probabilities = restated(state, clip, visible, masked, config)

    close(output.pred, pred)
    close(output.loss_per_token, losses)
    close(output.reconstruction_loss, losses.mean())
    loss = losses.mean()
    if probabilities is not None:
        sampling_loss = -(probabilities.gather(1, masked).log() * losses.detach()).mean()
        close(output.log_probs.exp(), probabilities)
        close(output.sampling_loss, sampling_loss)
        loss = loss + config.sampling_loss_weight * sampling_loss
    loss.backward()
    gradients = to_external({name: value.grad for name, value in model.named_parameters()}, layout, config.tubelet_size)
    assert gradients.keys() == state.keys()
    for name, gradient in gradients.items():
        close(gradient, state[name].grad, name)


def test_classifier() -> None:
    config = small()
    model, clip = VideoClassifier(config, num_classes=5).eval(), random_clip(config)
    randomize(model)
    state = {name: value.double() for name, value in to_external(model.state_dict(), "adamae").items()}
    x = embed(state, "patch_embed.proj.", clip, config)
    x = blocks(state, "blocks.", x + sine_table(x.shape[1], x.shape[2]), config.dimensions.encoder_heads)
    close(model(clip), linear(state, "head.", norm(state, "fc_norm.", x.mean(1))))

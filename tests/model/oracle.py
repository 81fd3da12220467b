"""The paper's model and losses, literally and slowly, on a state dict in the authors' layout, for comparison.

Shares no code with `model` or `kernels`: targets are cut out in loops, attention is a softmax of scores, positions come
out of math.sin; everything is in double precision.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Values:
    probabilities: Tensor | None
    pred: Tensor
    loss_per_token: Tensor
    reconstruction_loss: Tensor
    sampling_loss: Tensor | None


@dataclass
class Shape:
    tubelet_size: int
    patch_size: int
    encoder_heads: int
    decoder_heads: int
    loss: str = "mse"
    normalize_target: bool = True


def adamae(state: dict[str, Tensor], clip: Tensor, visible_ids: Tensor, masked_ids: Tensor, shape: Shape) -> Values:
    pixels = clip.movedim(4, 1).double() / 255
    tokens = embed(state, "encoder.patch_embed.proj.", pixels, shape)
    probabilities = None
    if "encoder.pos_embed_probs" in state:
        probabilities = token_probabilities(state, tokens.detach())

    width = tokens.shape[-1]
    x = pick(tokens + sine_table(tokens.shape[1], width), visible_ids)
    for i in range(count_blocks(state, "encoder.blocks.")):
        x = block(state, f"encoder.blocks.{i}.", x, shape.encoder_heads, 1e-6)
    x = norm(state, "encoder.norm.", x, 1e-6) @ state["encoder_to_decoder.weight"].T
    table = sine_table(tokens.shape[1], x.shape[-1]).expand(len(clip), -1, -1)
    x = torch.cat([x + pick(table, visible_ids), state["mask_token"] + pick(table, masked_ids)], dim=1)
    for i in range(count_blocks(state, "decoder.blocks.")):
        x = block(state, f"decoder.blocks.{i}.", x, shape.decoder_heads, 1e-6)
    x = norm(state, "decoder.norm.", x[:, -masked_ids.shape[1] :], 1e-6)
    pred = x @ state["decoder.head.weight"].T + state["decoder.head.bias"]

    target = pick(targets(pixels, shape), masked_ids)
    difference = pred - target
    loss_per_token = (difference**2 if shape.loss == "mse" else difference.abs()).mean(-1)
    sampling = None
    if probabilities is not None:
        chosen = torch.log(torch.gather(probabilities, 1, masked_ids))
        sampling = -(chosen * loss_per_token.detach()).mean(1).mean()
    return Values(probabilities, pred, loss_per_token, loss_per_token.mean(), sampling)


def embed(state: dict[str, Tensor], name: str, pixels: Tensor, shape: Shape) -> Tensor:
    mean = torch.tensor([0.485, 0.456, 0.406], dtype=torch.double).view(1, 3, 1, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225], dtype=torch.double).view(1, 3, 1, 1, 1)
    step = (shape.tubelet_size, shape.patch_size, shape.patch_size)
    tokens = torch.nn.functional.conv3d((pixels - mean) / std, state[name + "weight"], state[name + "bias"], step)
    return tokens.flatten(2).transpose(1, 2)


def token_probabilities(state: dict[str, Tensor], tokens: Tensor) -> Tensor:
    x = tokens + state["encoder.pos_embed_probs"]
    stages = count_blocks(state, "encoder.get_token_probs.")
    for i in range(stages - 1):
        name = f"encoder.get_token_probs.{i}."
        if name + "weight" in state:  # the MLP of Table 1 (f)
            x = x @ state[name + "weight"].T + state[name + "bias"]
        else:
            x = block(state, name, x, 8, 1e-5)
    name = f"encoder.get_token_probs.{stages - 1}."
    return torch.softmax((x @ state[name + "weight"].T + state[name + "bias"])[..., 0], dim=-1)


def classifier(state: dict[str, Tensor], clip: Tensor, shape: Shape) -> Tensor:
    """Logits of a fine-tuned model."""
    x = embed(state, "patch_embed.proj.", clip.movedim(4, 1).double() / 255, shape)
    x = x + sine_table(x.shape[1], x.shape[2])
    for i in range(count_blocks(state, "blocks.")):
        x = block(state, f"blocks.{i}.", x, shape.encoder_heads, 1e-6)
    return norm(state, "fc_norm.", x.mean(1), 1e-6) @ state["head.weight"].T + state["head.bias"]


def targets(pixels: Tensor, shape: Shape) -> Tensor:
    """[B, N, P], pixels in [0, 1]."""
    t, p = shape.tubelet_size, shape.patch_size
    batch, _, frames, height, width = pixels.shape
    clips = []
    for b in range(batch):
        patches = []
        for start in range(0, frames, t):
            for top in range(0, height, p):
                for left in range(0, width, p):
                    patch = pixels[b, :, start : start + t, top : top + p, left : left + p]
                    if shape.normalize_target:
                        center = patch.mean(dim=(1, 2, 3), keepdim=True)
                        spread = ((patch - center) ** 2).sum(dim=(1, 2, 3), keepdim=True) / (t * p * p - 1)
                        patch = (patch - center) / (spread.sqrt() + 1e-6)
                    patches.append(torch.stack([patch[c] for c in range(3)], dim=-1).flatten())
        clips.append(torch.stack(patches))
    return torch.stack(clips)


def block(state: dict[str, Tensor], name: str, x: Tensor, heads: int, eps: float) -> Tensor:
    x = x + attention(state, name + "attn.", norm(state, name + "norm1.", x, eps), heads)
    y = norm(state, name + "norm2.", x, eps)
    y = y @ state[name + "mlp.fc1.weight"].T + state[name + "mlp.fc1.bias"]
    y = y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    return x + y @ state[name + "mlp.fc2.weight"].T + state[name + "mlp.fc2.bias"]


def attention(state: dict[str, Tensor], name: str, x: Tensor, heads: int) -> Tensor:
    width = x.shape[-1]
    q, k, v = (x @ part.T for part in state[name + "qkv.weight"].split(width))
    if name + "q_bias" in state:
        q, v = q + state[name + "q_bias"], v + state[name + "v_bias"]
    size = width // heads
    outputs = []
    for h in range(heads):
        own = slice(h * size, (h + 1) * size)
        scores = q[..., own] @ k[..., own].transpose(1, 2) / math.sqrt(size)
        outputs.append(torch.softmax(scores, dim=-1) @ v[..., own])
    return torch.cat(outputs, dim=-1) @ state[name + "proj.weight"].T + state[name + "proj.bias"]


def norm(state: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    center = x.mean(-1, keepdim=True)
    spread = ((x - center) ** 2).mean(-1, keepdim=True)
    return (x - center) / torch.sqrt(spread + eps) * state[name + "weight"] + state[name + "bias"]


def sine_table(count: int, width: int) -> Tensor:
    rows = [
        [
            (math.sin if channel % 2 == 0 else math.cos)(place / 10000 ** (2 * (channel // 2) / width))
            for channel in range(width)
        ]
        for place in range(count)
    ]
    return torch.tensor(rows, dtype=torch.double)


def pick(x: Tensor, ids: Tensor) -> Tensor:
    return torch.stack([row[own] for row, own in zip(x, ids, strict=True)])


def count_blocks(state: dict[str, Tensor], prefix: str) -> int:
    return len({name[len(prefix) :].split(".")[0] for name in state if name.startswith(prefix)})

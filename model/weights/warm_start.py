"""Initializes a model from weights of another clip shape, decoder or sampler: takes what fits and reports it."""

from pathlib import Path

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from common.errors import InputError
from model.adamae import AdaMAE
from model.config import Grid, ModelConfig
from model.weights import pretrained
from model.weights.loading import load_weights, shapes

StateDict = dict[str, Tensor]
LEARNED_POSITIONS = "token_sampler.positions"
ENCODER = ("encoder_width", "encoder_depth", "encoder_heads", "tubelet_size", "patch_size")  # what must be the same
CLIP = ("num_frames", "image_size", "in_channels", "positions")  # and what may be another one
OF_PATCHES = ("tokenizer.projection.weight", "decoder.head.weight", "decoder.head.bias")
# Taken as a whole or not at all. A classifier has the first two, and no more an encoder's last norm.
NEEDED = ("tokenizer.", "encoder.blocks.")
PARTS = (*NEEDED, "encoder.norm.", "decoder.", "token_sampler.")


def warm_start(model: AdaMAE, path: Path) -> str:
    """Load the weights at `path` into a new model as far as they fit; return a sentence on what was taken.

    Tokenizer and encoder must fit; a decoder or sampler that is missing or of another shape is initialized from
    scratch. Raises InputError with all that does not fit. The same clip shape changes no value.
    """
    state, theirs, _ = pretrained.load(path, like=model.config)
    check_encoder(model.config, theirs, str(path))
    given = adapt_weights(state, theirs, model.config)
    own = model.state_dict()
    taken: StateDict = {}
    loaded, fresh = [], []
    for part in PARTS:
        wanted, found = _of(part, own), _of(part, given)
        if part in NEEDED or (wanted and shapes(wanted) == shapes(found)):
            taken |= found
            loaded.append(_title(part))
        elif wanted:
            taken |= wanted
            fresh.append(f"{_title(part)} ({'of another shape there' if found else 'not there'})")
    load_weights(model, taken)
    left_out = sorted({name.split(".")[0] for name in given} - {name.split(".")[0] for name in own})
    said = [f"weights of {path}: {', '.join(loaded)}"]
    if LEARNED_POSITIONS in taken and given.get(LEARNED_POSITIONS) is not state.get(LEARNED_POSITIONS):
        said.append(f"the sampler's positions interpolated from {_by(theirs.grid)} to {_by(model.config.grid)} tokens")
    if theirs.in_channels != model.config.in_channels:
        said.append(
            f"the tokenizer's and the decoder's weights averaged over {theirs.in_channels} channels for"
            f" {model.config.in_channels}"
        )
    if fresh:
        said.append(f"initialized from scratch: {', '.join(fresh)}")
    if left_out:
        said.append(f"left out: {', '.join(left_out)}")
    return "; ".join(said)


def adapt_weights(state: StateDict, theirs: ModelConfig, ours: ModelConfig) -> StateDict:
    """Adapt weights of `theirs` to clips of the length, size and channels of `ours`.

    Only learned positions depend on the first two; what reads and predicts patches depends on the channels.
    """
    if theirs.in_channels != ours.in_channels:
        changed = {name: adapt_patch_channels(name, state[name], theirs, ours) for name in OF_PATCHES if name in state}
        state = state | changed
    if LEARNED_POSITIONS not in state or theirs.grid == ours.grid:
        return state
    return state | {LEARNED_POSITIONS: interpolate_positions(state[LEARNED_POSITIONS], theirs.grid, ours.grid)}


def adapt_patch_channels(name: str, value: Tensor, theirs: ModelConfig, ours: ModelConfig) -> Tensor:
    """Adapt a weight of OF_PATCHES to another number of channels, equal in all of them.

    What is predicted is the mean over theirs, what is read their sum divided by ours: a gray clip makes equal tokens.
    """
    axis = 1 if name.startswith("tokenizer.") else 0
    by_channel = value.unflatten(axis, (-1, theirs.in_channels))  # the last within a patch's values
    mean = by_channel.mean(dim=axis + 1, keepdim=True)
    if axis:
        mean = mean * (theirs.in_channels / ours.in_channels)
    shape = [-1] * mean.ndim
    shape[axis + 1] = ours.in_channels
    return mean.expand(shape).flatten(axis, axis + 1).contiguous()


def interpolate_positions(table: Float[Tensor, "n D"], before: Grid, after: Grid) -> Float[Tensor, "N D"]:
    """Interpolate positions trilinearly from one token grid to another, between centers."""
    volume = table.float().unflatten(0, before).movedim(-1, 0)[None]
    volume = F.interpolate(volume, size=after, mode="trilinear", align_corners=False)
    return volume[0].movedim(0, -1).flatten(0, 2).to(table.dtype).contiguous()


def check_encoder(ours: ModelConfig, theirs: ModelConfig, where: str) -> None:
    """Raises InputError, with all differences, if an encoder trained as `theirs` says is not what `ours` asks for."""
    wanted, given = ({**vars(config), **config.dimensions._asdict()} for config in (ours, theirs))
    if others := [name for name in ENCODER if wanted[name] != given[name]]:
        has = ", ".join(f"{name} {given[name]} instead of {wanted[name]}" for name in others)
        raise InputError(
            f"{where} has {has}: remove the conflicting options, or set"
            f" {' '.join(f'model.{name}={given[name]}' for name in others)}"
        )


def _of(part: str, state: StateDict) -> StateDict:
    return {name: value for name, value in state.items() if name.startswith(part)}


def _title(part: str) -> str:
    return part.rstrip(".").replace("_", " ").replace(".", "'s ")


def _by(grid: Grid) -> str:
    return "×".join(map(str, grid))

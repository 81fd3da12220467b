"""Initializes a model from weights of another clip shape, decoder or sampler: takes what fits and reports it."""

from pathlib import Path

import torch.nn.functional as F

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.model.state_dict import LEARNED_POSITIONS, StateDict, load_weights, select, shapes
from adamae.model.weights import pretrained

ENCODER = (
    "encoder_width",
    "encoder_depth",
    "encoder_heads",
    "tubelet_size",
    "patch_size",
)  # what must be the same
CLIP = ("num_frames", "image_size", "in_channels", "positions")  # and what may be another one
# The dimension that is a patch's values, of what reads and predicts them.
OF_PATCHES = {"tokenizer.projection.weight": 1, "decoder.head.weight": 0, "decoder.head.bias": 0}
PARTS = {  # each is taken as a whole or not at all; the first two always fit, once `check_encoder` has passed
    "tokenizer.": "tokenizer",
    "encoder.blocks.": "encoder's blocks",
    "encoder.norm.": "encoder's norm",
    "decoder.": "decoder",
    "token_sampler.": "token sampler",
}


def warm_start(model: AdaMAE, path: Path) -> str:
    """Load the weights at `path` into a new model as far as they fit; return a sentence on what was taken.

    Tokenizer and encoder must fit; a decoder or sampler that is missing or of another shape is initialized from
    scratch. Raises InputError with all that does not fit. The same clip shape changes no value.
    """
    state, trained, *_ = pretrained.load(path, like=model.config)
    check_encoder(model.config, trained, str(path))
    given, own = adapt_weights(state, trained, model.config), model.state_dict()
    loaded, fresh = [], []
    for part, title in PARTS.items():
        wanted, found = (shapes(select(weights, part)) for weights in (own, given))
        if wanted and wanted == found:
            load_weights(model, given, (part,))
            loaded.append(title)
        elif wanted:
            fresh.append(f"{title} ({'of another shape there' if found else 'not there'})")
    left_out = sorted({name.split(".")[0] for name in given} - {name.split(".")[0] for name in own})
    said = [f"weights of {path}: {', '.join(loaded)}"]
    if PARTS["token_sampler."] in loaded and trained.grid != model.config.grid:
        sizes = ("×".join(map(str, config.grid)) for config in (trained, model.config))
        said.append(f"the sampler's positions interpolated from {' to '.join(sizes)} tokens")
    if (before := trained.in_channels) != (after := model.config.in_channels):
        said.append(
            f"the tokenizer's and the decoder's weights averaged over {before} channels for {after}"
        )
    if fresh:
        said.append(f"initialized from scratch: {', '.join(fresh)}")
    if left_out:
        said.append(f"left out: {', '.join(left_out)}")
    return "; ".join(said)


def check_encoder(config: ModelConfig, trained: ModelConfig, where: str) -> None:
    """Raise InputError, with all differences, if an encoder trained as `trained` says is not what `config` asks for."""
    wanted, given = ({**vars(each), **each.dimensions._asdict()} for each in (config, trained))
    if others := [name for name in ENCODER if wanted[name] != given[name]]:
        has = ", ".join(f"{name} {given[name]} instead of {wanted[name]}" for name in others)
        raise InputError(
            f"{where} has {has}: remove the conflicting options, or set"
            f" {' '.join(f'model.{name}={given[name]}' for name in others)}"
        )


def adapt_weights(state: StateDict, trained: ModelConfig, config: ModelConfig) -> StateDict:
    """Adapt weights of a model `trained` to clips of the length, size and channels of `config`.

    Only learned positions depend on the first two: they are interpolated trilinearly, between the centers of tokens.
    Weights of patches become equal in all channels: what is predicted is the mean over the trained ones, what is read
    their sum divided by the new number, so that a gray clip makes equal tokens.
    """
    adapted = dict(state)
    for name in (
        OF_PATCHES.keys() & state.keys() if trained.in_channels != config.in_channels else ()
    ):
        axis = OF_PATCHES[name]
        mean = (
            state[name].unflatten(axis, (-1, trained.in_channels)).mean(dim=axis + 1, keepdim=True)
        )
        if axis == 1:
            mean = mean * (trained.in_channels / config.in_channels)
        adapted[name] = mean.repeat_interleave(config.in_channels, dim=axis + 1).flatten(
            axis, axis + 1
        )
    if LEARNED_POSITIONS in state and trained.grid != config.grid:
        table = state[LEARNED_POSITIONS]
        volume = table.float().unflatten(0, trained.grid).movedim(-1, 0)[None]
        volume = F.interpolate(volume, size=config.grid, mode="trilinear", align_corners=False)
        adapted[LEARNED_POSITIONS] = (
            volume[0].movedim(0, -1).flatten(0, 2).to(table.dtype).contiguous()
        )
    return adapted

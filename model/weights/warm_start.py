"""Initializes a model from weights of another clip shape, decoder or sampler.

Takes what fits, and reports it.
"""

from pathlib import Path

import torch.nn.functional as F
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.config import Grid, ModelConfig
from adamae.model.state_dict import LEARNED_POSITIONS, StateDict, load_weights, select, shapes
from adamae.model.weights import pretrained

# The options that must be those of the weights.
ENCODER = ("encoder_width", "encoder_depth", "encoder_heads", "tubelet_size", "patch_size")
# The options of a clip, to which weights can be adapted.
CLIP = ("num_frames", "image_size", "in_channels", "positions")
# Weights that read or predict the values of a patch: the dimension along which these lie.
PATCH_DIMENSIONS = {
    "tokenizer.projection.weight": 1,
    "decoder.head.weight": 0,
    "decoder.head.bias": 0,
}
# Starts of names, and titles. Each part is loaded as a whole or not at all; the first two always
# fit, once `check_encoder` has passed.
PARTS = {
    "tokenizer.": "tokenizer",
    "encoder.blocks.": "encoder's blocks",
    "encoder.norm.": "encoder's norm",
    "decoder.": "decoder",
    "token_sampler.": "token sampler",
    "views.": "projector of views",
}


def warm_start(model: AdaMAE, path: Path) -> str:
    """Load the weights at `path` into a new model as far as they fit; return a sentence about them.

    Tokenizer and encoder must fit; a decoder or sampler that is missing or of another shape is
    initialized from scratch. Raise InputError with all that does not fit. The same clip shape
    changes no value.
    """
    state, trained, *_ = pretrained.load(path, like=model.config)
    check_encoder(model.config, trained, str(path))
    weights = adapt_weights(state, trained, model.config)
    loaded, initialized = _load_parts(model, weights)
    left_out = _list_modules(weights) - _list_modules(model.state_dict())

    facts = [f"weights of {path}: {', '.join(loaded)}"]
    if PARTS["token_sampler."] in loaded and trained.grid != model.config.grid:
        sizes = f"{_show_grid(trained)} to {_show_grid(model.config)}"
        facts.append(f"the sampler's positions interpolated from {sizes} tokens")
    if trained.in_channels != model.config.in_channels:
        facts.append(
            "the tokenizer's and the decoder's weights averaged over"
            f" {trained.in_channels} channels for {model.config.in_channels}"
        )
    if initialized:
        facts.append(f"initialized from scratch: {', '.join(initialized)}")
    if left_out:
        facts.append(f"left out: {', '.join(sorted(left_out))}")
    return "; ".join(facts)


def _load_parts(model: AdaMAE, weights: StateDict) -> tuple[list[str], list[str]]:
    """Load the parts that fit; return their titles, and those of the others with a reason."""
    loaded = []
    initialized = []
    state = model.state_dict()
    for part, title in PARTS.items():
        expected = shapes(select(state, part))
        actual = shapes(select(weights, part))
        if not expected:
            # A part that this model does not have.
            continue
        if actual == expected:
            load_weights(model, weights, (part,))
            loaded.append(title)
        elif actual:
            initialized.append(f"{title} (of another shape there)")
        else:
            initialized.append(f"{title} (not there)")
    return loaded, initialized


def _list_modules(state_dict: StateDict) -> set[str]:
    """Return the first words of names: the modules that a model consists of."""
    return {name.split(".")[0] for name in state_dict}


def _show_grid(config: ModelConfig) -> str:
    return "×".join(map(str, config.grid))


def check_encoder(config: ModelConfig, trained: ModelConfig, where: str) -> None:
    """Raise InputError, with all differences, if a trained encoder is not of `config`."""
    expected = {**vars(config), **config.dimensions._asdict()}
    actual = {**vars(trained), **trained.dimensions._asdict()}
    names = [name for name in ENCODER if actual[name] != expected[name]]
    if not names:
        return
    differences = [f"{name} {actual[name]} instead of {expected[name]}" for name in names]
    options = [f"model.{name}={actual[name]}" for name in names]
    raise InputError(
        f"{where} has {', '.join(differences)}: remove the conflicting options, or set"
        f" {' '.join(options)}"
    )


def adapt_weights(state: StateDict, trained: ModelConfig, config: ModelConfig) -> StateDict:
    """Adapt weights of a model `trained` to clips of the length, size and channels of `config`.

    Only learned positions depend on length and size, and only weights of patches on channels.
    """
    adapted = dict(state)
    if trained.in_channels != config.in_channels:
        for name, dimension in PATCH_DIMENSIONS.items():
            if name in state:
                adapted[name] = _adapt_channels(
                    state[name], dimension, trained.in_channels, config.in_channels
                )
    if LEARNED_POSITIONS in state and trained.grid != config.grid:
        adapted[LEARNED_POSITIONS] = _interpolate_positions(
            state[LEARNED_POSITIONS], trained.grid, config.grid
        )
    return adapted


def _adapt_channels(weight: Tensor, dimension: int, trained_channels: int, channels: int) -> Tensor:
    """Make weights of patches equal in all channels, whose values alternate along `dimension`.

    What is predicted (0) is the mean over the trained channels: of a head for R, G, B, with weights
    3, 6 and 0, two channels have 3 each. What is read (1) is their sum divided by the new number,
    so that a gray clip makes equal tokens: of a tokenizer, two channels have 4.5 each.
    """
    by_channel = weight.unflatten(dimension, (-1, trained_channels))
    mean = by_channel.mean(dim=dimension + 1, keepdim=True)
    if dimension == 1:
        mean = mean * (trained_channels / channels)
    repeated = mean.repeat_interleave(channels, dim=dimension + 1)
    return repeated.flatten(dimension, dimension + 1)


def _interpolate_positions(table: Tensor, trained_grid: Grid, grid: Grid) -> Tensor:
    """Interpolate learned positions [N, D] trilinearly, between the centers of tokens."""
    volume = table.float().unflatten(0, trained_grid).movedim(-1, 0)[None]
    volume = F.interpolate(volume, size=grid, mode="trilinear", align_corners=False)
    positions = volume[0].movedim(0, -1).flatten(0, 2)
    return positions.to(table.dtype).contiguous()

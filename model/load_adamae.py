"""Loads a pre-training model, with its teacher if it has one, from all that holds its weights."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.encoders.teacher import make_teacher
from adamae.model.state_dict import load_weights
from adamae.model.targets import make_target
from adamae.model.weights import pretrained
from adamae.model.weights.warm_start import CLIP, adapt_weights


def load_adamae(path: str | Path, **changes: Any) -> AdaMAE:
    """Load a pre-training model.

    changes: of its configuration, such as mask_ratio=0.9, or num_frames and image_size of other
    clips: learned positions are then interpolated. Raise InputError if weights are missing.
    """
    state, config, *_ = pretrained.load(path)
    if config.target == "none":
        raise InputError(
            f"{path} was trained with model.target=none and predicts nothing: load its encoder"
            " (load_encoder), or choose a run with another target"
        )
    if "decoder.mask_token" not in state:
        raise InputError(
            f"{path} has no decoder, only an encoder: choose the run or file of the pre-training"
        )
    clip_changes = {name: changes.pop(name) for name in CLIP if name in changes}
    model_config = replace(config, **clip_changes)
    teacher = make_teacher(model_config)
    model = AdaMAE(model_config, make_target(model_config, teacher))
    load_weights(model, adapt_weights(state, config, model_config))
    # The other changes are of the masking, which asks for the same weights.
    if changes:
        model = model.with_masking(**changes)
    return model.eval()

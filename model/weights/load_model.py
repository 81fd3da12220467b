"""Loads models for inference, on the CPU, from all that `model.weights.pretrained.load` takes.

This is a run, a checkpoint, an export, another project's file, or a model of the Hugging Face Hub.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.encoder import VideoEncoder
from adamae.model.state_dict import ENCODER_PARTS, LEARNED_POSITIONS, load_weights
from adamae.model.targets import make_target
from adamae.model.weights import pretrained
from adamae.model.weights.teachers import make_teacher
from adamae.model.weights.warm_start import CLIP, adapt_weights


def load_adamae(path: str | Path, **changes: Any) -> AdaMAE:
    """Load a pre-training model.

    changes: of its configuration, such as mask_ratio=0.9, or num_frames and image_size of other
    clips: learned positions are then interpolated. Raise InputError if weights are missing.
    """
    state, config, *_ = pretrained.load(path)
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


def load_encoder(path: str | Path, **changes: Any) -> VideoEncoder:
    """Load tokenizer and encoder, and the token sampler where there is one.

    changes: num_frames, image_size and in_channels of other clips than it was trained with. Raise
    InputError if weights are missing.
    """
    state, config, *_ = pretrained.load(path)
    has_norm = "encoder.norm.weight" in state
    has_sampler = LEARNED_POSITIONS in state
    encoder = VideoEncoder(replace(config, **changes), has_norm, has_sampler)
    weights = adapt_weights(state, config, encoder.config)
    load_weights(encoder, weights, (*ENCODER_PARTS, "token_sampler."))
    return encoder.eval()

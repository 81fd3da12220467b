"""Loads models for inference, on the CPU, from all that `model.weights.pretrained.load` takes.

This is a run, a checkpoint, an export, another project's file, or a model of the Hugging Face Hub.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

from adamae.model.encoder import VideoEncoder
from adamae.model.state_dict import ENCODER_PARTS, LEARNED_POSITIONS, load_weights
from adamae.model.weights import pretrained
from adamae.model.weights.warm_start import adapt_weights


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

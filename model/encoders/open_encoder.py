"""Opens encoders by what a user calls them: a path, or the name of a model on the Hub."""

from pathlib import Path
from typing import Literal, get_args

from adamae.common.errors import InputError
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.own import OwnEncoder
from adamae.model.weights.hub import find_model

# What an image model makes of a clip beside the mean over its frames.
Frames = Literal["mean", "difference"]


def open_encoder(
    spec: str | Path,
    *,
    num_frames: int | None = None,
    image_size: int | list[int] | None = None,
    frames: str = "mean",
) -> Encoder:
    """Open a frozen encoder, on the CPU and in evaluation mode.

    spec: a run, a checkpoint, an export, another project's file, a folder of transformers or timm,
        or hf://user/name[@revision], the only one that is looked up on the network.
    num_frames, image_size: of the clips that it shall take, in pixels, a side or height and width;
        None: as it was trained.
    frames: what the vector of a clip is, for image models: "mean", the mean over its frames, or
        "difference", which appends the mean absolute difference of neighboring frames.

    Raise InputError if there is no such encoder, or it does not take such clips.
    """
    if frames not in get_args(Frames):
        raise InputError(f"frames is {frames!r}: choose one of {', '.join(get_args(Frames))}")
    is_on_hub = str(spec).startswith("hf://")
    path = find_model(str(spec)) if is_on_hub else Path(spec)
    size = [image_size] if isinstance(image_size, int) else image_size
    encoder = OwnEncoder(path, num_frames, size)
    encoder.name = str(spec).removeprefix("hf://")
    return encoder.requires_grad_(False).eval()

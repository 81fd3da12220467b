"""Opens encoders by what a user calls them: a path, or the name of a model on the Hub.

A new kind is a file beside this one, and a line in KINDS.
"""

from pathlib import Path
from pkgutil import resolve_name
from typing import Any, get_args

from adamae.common.errors import InputError
from adamae.common.locations import local_path
from adamae.model.encoders.encoder import Encoder
from adamae.model.encoders.images import FrameEncoder, FramePooling
from adamae.model.weights.find_weights import find_file
from adamae.model.weights.hub import find_model
from adamae.model.weights.tensor_files import read_json, read_shapes

OWN = "adamae.model.encoders.own:OwnEncoder"
TIMM = "adamae.model.encoders.timm_images:TimmEncoder"
VJEPA2_1 = "adamae.model.encoders.vjepa2_1:VJepa21Encoder"
# In the files of V-JEPA 2 and 2.1. A VideoMAE has no bias of keys.
VJEPA2_NAMES = {"backbone.patch_embed.proj.weight", "backbone.blocks.0.attn.qkv.bias"}
_IMAGES = "adamae.model.encoders.transformers_images"
# By the model_type in the config.json of transformers. Classes are named, not imported: each
# library takes seconds.
KINDS = {
    "videomae": OWN,
    "vjepa2": "adamae.model.encoders.vjepa2:VJepa2Encoder",
    "videoprism": "adamae.model.encoders.videoprism:VideoPrismEncoder",
    "videoprism_vision_model": "adamae.model.encoders.videoprism:VideoPrismEncoder",
    "vivit": "adamae.model.encoders.vivit:VivitEncoder",
    "timesformer": "adamae.model.encoders.timesformer:TimesformerEncoder",
    "dinov2": f"{_IMAGES}:Dinov2Encoder",
    "dinov2_with_registers": f"{_IMAGES}:Dinov2RegistersEncoder",
    "dinov3_vit": f"{_IMAGES}:Dinov3Encoder",
    "dinov3_convnext": f"{_IMAGES}:Dinov3ConvNextEncoder",
    "siglip": f"{_IMAGES}:SiglipEncoder",
    "siglip_vision_model": f"{_IMAGES}:SiglipEncoder",
    "siglip2": f"{_IMAGES}:Siglip2Encoder",
    "siglip2_vision_model": f"{_IMAGES}:Siglip2Encoder",
    "clip": f"{_IMAGES}:ClipEncoder",
    "clip_vision_model": f"{_IMAGES}:ClipEncoder",
}


def open_encoder(
    spec: str | Path,
    *,
    num_frames: int | None = None,
    image_size: int | list[int] | tuple[int, int] | None = None,
    frames: FramePooling = "mean",
) -> Encoder:
    """Open a frozen encoder, in fp32, on the CPU and in evaluation mode.

    spec: a run, a checkpoint, an export, another project's file, a folder of transformers or timm,
        or hf://user/name[@revision], the only one that is looked up on the network.
    num_frames, image_size: of the clips that it shall take, in pixels, a side or height and width;
        None: as it was trained, and 16 frames for an image model.
    frames: what the vector of a clip is, for image models: "mean", the mean over its frames, or
        "difference", which appends the mean absolute difference of neighboring frames.

    Raise InputError if there is no such encoder, or it does not take such clips.
    """
    _check_frames(frames, num_frames)
    path = find_encoder(spec)
    encoder: Encoder = choose_kind(path)(path, num_frames, _as_sides(image_size))
    encoder.name = str(spec).removeprefix("hf://")
    if isinstance(encoder, FrameEncoder):
        encoder.frames = frames
    elif frames != "mean":
        raise InputError(
            f"frames={frames} is for image models, and {encoder.name} is a model of videos: leave"
            " it out"
        )
    return encoder.requires_grad_(False).eval()


def find_encoder(spec: str | Path) -> Path:
    """Return the folder or file of an encoder; that of hf://user/name is downloaded once.

    Raise InputError if there is no such model on the Hub, or the Hub cannot be reached.
    """
    if str(spec).startswith("hf://"):
        return find_model(str(spec))
    return local_path(str(spec))


def list_files(path: Path) -> list[Path]:
    """List the files that an encoder is read from: its weights, and what describes them."""
    if path.is_file() or choose_kind(path) is resolve_name(OWN):
        return [find_file(path)]
    return sorted([*path.glob("*.json"), *path.glob("*.safetensors")])


def _as_sides(image_size: int | list[int] | tuple[int, int] | None) -> tuple[int, int] | None:
    """Return height and width of what a command takes: nothing, a side, or both."""
    if image_size is None:
        return None
    sides = [image_size] if isinstance(image_size, int) else list(image_size)
    if len(sides) not in (1, 2) or min(sides) < 1:
        raise InputError(
            f"image_size is {image_size}: must be a whole number of at least 1, or two: height and"
            " width"
        )
    return sides[0], sides[-1]


def _check_frames(frames: FramePooling, num_frames: int | None) -> None:
    """Raise InputError if there is no such way to pool frames, or too few of them for it."""
    if frames not in get_args(FramePooling):
        raise InputError(f"frames is {frames!r}: choose one of {', '.join(get_args(FramePooling))}")
    if frames == "difference" and num_frames == 1:
        raise InputError("differences of frames need two, and num_frames is 1: raise it")


def choose_kind(path: Path) -> Any:
    """Return the class that opens a path; raise InputError for a model that none is for.

    Folders of timm and of transformers have a config.json, which names the model.
    """
    file = path / "config.json"
    description = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    if "architecture" in description:
        return resolve_name(TIMM)
    model_type = description.get("model_type", "videomae")
    if model_type not in KINDS:
        raise InputError(
            f"{path} is a {model_type} of transformers, which no encoder here is for: choose one of"
            f" {', '.join(KINDS)}, or a model of timm"
        )
    if path.is_file() and _is_vjepa2(path):
        return resolve_name(VJEPA2_1)
    return resolve_name(KINDS[model_type])


def _is_vjepa2(file: Path) -> bool:
    """Return whether a file holds an encoder of V-JEPA 2 or 2.1 as its authors publish it."""
    return read_shapes(file).keys() >= VJEPA2_NAMES

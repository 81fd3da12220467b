"""Weights in and out.

    python export.py import CHECKPOINT OUTPUT.safetensors     any published checkpoint -> a file of ours
    python export.py export RUN OUTPUT --to adamae            the authors' layout, as do videomae and huggingface
    python export.py export RUN OUTPUT --to encoder           tokenizer and encoder alone, with a model card

RUN is whatever `from_pretrained` takes. OUTPUT is a folder for `huggingface` and `encoder`, else a file: safetensors,
or PyTorch's format under the key `model` where its name ends in .pth or .pt, as the authors' scripts read it.
"""

import argparse
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from common.atomic_io import atomic_write, write_json, write_text
from common.errors import InputError, run_command
from common.logging import log
from kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.weights import pretrained
from model.weights.layouts import to_adamae, to_huggingface, to_videomae
from model.weights.loading import check_keys, shapes
from model.weights.weight_files import save_tensors
from training.remote_run import local_run

StateDict = dict[str, Tensor]


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    source, output = Path(options.source), Path(options.output)
    weights = pretrained.load(source, options.num_frames)
    state, config, _ = weights
    check(state, config)
    if options.command == "import":
        if output.suffix != ".safetensors":
            raise InputError(f"{output} is no safetensors file: give a name that ends in .safetensors")
        output.parent.mkdir(parents=True, exist_ok=True)
        pretrained.save(output, state, pretrained.make_metadata(config, weights.classes))
        say_what_was_assumed(source, state, config)
    elif options.to == "encoder":
        export_encoder(state, config, source, output)
    elif options.to == "huggingface":
        export_huggingface(weights, output)
    else:
        convert = to_adamae if options.to == "adamae" else to_videomae
        write_weights(output, convert(state, config.tubelet_size, config.in_channels))
    log(f"{output}: {sum(value.numel() for value in state.values()) / 1e6:.1f} M parameters read from {source}")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in (("import", "CHECKPOINT"), ("export", "RUN")):
        command = commands.add_parser(name)
        command.add_argument("source", type=local_run, metavar=source)
        command.add_argument("output", metavar="OUTPUT")
        command.add_argument(
            "--num-frames",
            type=int,
            default=16,
            metavar="T",
            help="of a clip; asked for where the file does not say it",
        )
        if name == "export":
            command.add_argument("--to", choices=("adamae", "videomae", "huggingface", "encoder"), default="encoder")
    return parser.parse_args(arguments)


def check(state: StateDict, config: ModelConfig) -> None:
    """Raise InputError unless `state` is a whole pre-training model or classifier of `config`."""
    model: nn.Module
    with torch.device("meta"):
        model = VideoClassifier(config, len(state["head.weight"])) if "head.weight" in state else AdaMAE(config)
    check_keys(shapes(model.state_dict()), shapes(state))


def say_what_was_assumed(source: Path, state: StateDict, config: ModelConfig) -> None:
    """What stands in the new file and not in the old one, and what is in neither."""
    if assumed := pretrained.assumed_fields(source, config):
        log(f"{source} does not say these, which the new file does: {', '.join(assumed)}", sys.stderr)
    if "head.weight" not in state and config.masking != "adaptive":
        log("there is no token sampler in it: with model.masking=adaptive, one starts fresh", sys.stderr)


def write_weights(path: Path, state: StateDict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside:
        if path.suffix == ".safetensors":
            save_tensors(aside, state, {"format": "pt"})
        elif path.suffix in (".pth", ".pt"):
            with aside.open("wb") as file:  # a name would be written into it, and this one is different every time
                torch.save({"model": state}, file)
        else:
            raise InputError(f"{path} is no file of weights: give a name that ends in .safetensors, .pth or .pt")


def export_huggingface(weights: pretrained.Weights, folder: Path) -> None:
    """A folder that `VideoMAEForPreTraining` or `VideoMAEForVideoClassification` reads with `from_pretrained`, and, of
    RGB, `AutoImageProcessor`, whose clips from raw frames are ours.

    Their last LayerNorm has an epsilon of 1e-5 whatever the configuration says, where ours and the authors' has 1e-6.
    """
    state, config, classes = weights
    if config.positions != "flat-1d":
        raise InputError(f"Hugging Face's VideoMAE has no {config.positions} positions: this model cannot be one")
    size = config.dimensions
    is_classifier = "head.weight" in state
    described: dict[str, Any] = {
        "model_type": "videomae",
        "architectures": ["VideoMAEForVideoClassification" if is_classifier else "VideoMAEForPreTraining"],
        "image_size": config.image_size,
        "patch_size": config.patch_size,
        "num_channels": config.in_channels,
        "num_frames": config.num_frames,
        "tubelet_size": config.tubelet_size,
        "hidden_size": size.encoder_width,
        "num_hidden_layers": size.encoder_depth,
        "num_attention_heads": size.encoder_heads,
        "intermediate_size": 4 * size.encoder_width,
        "decoder_hidden_size": size.decoder_width,
        "decoder_num_hidden_layers": size.decoder_depth,
        "decoder_num_attention_heads": size.decoder_heads,
        "decoder_intermediate_size": 4 * size.decoder_width,
        "layer_norm_eps": 1e-6,
        "norm_pix_loss": config.normalize_target,
        "use_mean_pooling": is_classifier,
    }
    if is_classifier:
        names = dict(enumerate(classes or (f"LABEL_{i}" for i in range(len(state["head.weight"])))))
        described |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", described)
    if config.in_channels == 3:  # their processor makes RGB of every frame
        write_json(folder / "preprocessor_config.json", preprocessor(config))
    write_weights(folder / "model.safetensors", to_huggingface(state, config.tubelet_size, config.in_channels))


def preprocessor(config: ModelConfig) -> dict[str, Any]:
    """How their image processor makes of raw frames what this model was trained on: the middle square, scaled."""
    height, width = config.frame_size
    return {
        "image_processor_type": "VideoMAEImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": height} if height == width else {"height": height, "width": width},
        "resample": 2,  # bilinear
        "do_center_crop": True,
        "crop_size": {"height": height, "width": width},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }


def export_encoder(state: StateDict, config: ModelConfig, source: Path, folder: Path) -> None:
    """`encoder.safetensors`, what downstream users need, and a README.md that says how to use it."""
    encoder = {name: value for name, value in state.items() if name.startswith(("tokenizer.", "encoder."))}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "encoder.safetensors"
    pretrained.save(file, encoder, pretrained.make_metadata(config))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    write_text(folder / "README.md", model_card(encoder, config, source, digest))


def model_card(encoder: StateDict, config: ModelConfig, source: Path, digest: str) -> str:
    size = config.dimensions
    height, width = config.frame_size
    channels = {3: "RGB", 1: "grey"}.get(config.in_channels, f"{config.in_channels} channels")
    parameters = sum(value.numel() for value in encoder.values()) / 1e6
    return f"""# AdaMAE encoder

A vision transformer for video, pre-trained as a masked autoencoder ({config.masking} masking,
{config.mask_ratio:.1%} of the tokens hidden). Exported from `{source.name}`.

| | |
|---|---|
| parameters | {parameters:.1f} M |
| width, depth, heads | {size.encoder_width}, {size.encoder_depth}, {size.encoder_heads} |
| input | {config.num_frames} frames of {height}×{width}, uint8, {channels} |
| tokens | {config.num_tokens}, each {config.tubelet_size} frames of {config.patch_size}×{config.patch_size} pixels |
| positions | {config.positions}, fixed, not in the file |
| sha256 of encoder.safetensors | `{digest}` |

```python
from model.encoder import VideoEncoder

encoder = VideoEncoder.from_pretrained("encoder.safetensors")
features = encoder.encode(clip)  # uint8 [B, {config.num_frames}, {height}, {width}, {config.in_channels}]
features.pooled  # [B, {size.encoder_width}]
features.tokens  # [B, {config.num_tokens}, {size.encoder_width}]
```

What it learnt from, and what it is good at, depends on the videos it was trained on: say so here before passing it on.

Model configuration: `{json.dumps({name: value for name, value in vars(config).items() if value is not None})}`
"""


if __name__ == "__main__":
    run_command(lambda: main(sys.argv[1:]))

"""Import and export weights.

    python export.py import CHECKPOINT OUTPUT.safetensors     another project's checkpoint -> a file of ours
    python export.py export RUN OUTPUT --to adamae            the authors' layout, or videomae or huggingface
    python export.py export RUN OUTPUT --to encoder           tokenizer and encoder alone, with a model card
    python export.py export RUN --push user/name              all of it to the Hugging Face Hub, with a model card

RUN is whatever `load_adamae` takes, or a URL: hf://user/name. OUTPUT is a folder for `huggingface` and `encoder`,
else a file: safetensors, or PyTorch's format under the key `model` where its name ends in .pth or .pt, as the authors'
scripts read it.
"""

import argparse
from pathlib import Path

from common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, source in (("import", "CHECKPOINT"), ("export", "RUN")):
        command = commands.add_parser(name)
        command.add_argument("source", metavar=source)
        command.add_argument("output", type=Path, metavar="OUTPUT", nargs="?" if name == "export" else None)
        command.add_argument(
            "--num-frames", type=int, default=16, metavar="T", help="frames per clip, if the file does not say"
        )
        if name == "export":
            command.add_argument("--to", choices=("adamae", "videomae", "huggingface", "encoder"), default="encoder")
            command.add_argument("--push", metavar="user/name", help="write to the Hugging Face Hub instead of OUTPUT")
            command.add_argument("--license", default="other", help="in the model card, such as cc-by-4.0")
    options = parser.parse_args(arguments)
    if options.command == "export" and (options.output is None) == (options.push is None):
        raise InputError("give OUTPUT or --push user/name, one of them")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import json
import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any

import torch

from common.atomic_io import atomic_write, write_json
from common.logging import log
from kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from model.config import ModelConfig
from model.state_dict import StateDict
from model.tokenizer import position_table
from model.weights import pretrained
from model.weights.hub import TIMM_FILE, push_folder
from model.weights.layouts import is_pretraining, to_external, to_timm
from model.weights.weight_files import save_tensors
from training.model_card import write_card
from training.remote_run import local_run


def main(options: argparse.Namespace) -> None:
    source, output = local_run(options.source), options.output
    weights = pretrained.load(source, options.num_frames)
    state, config, classes, multi_label, _ = weights
    is_own = config.target != "pixels" or config.decoder_attention != "self"
    if is_own and options.command == "export":  # a decoder that others cannot use
        state = {name: value for name, value in state.items() if not name.startswith(("decoder.", "token_sampler."))}
        weights = weights._replace(
            state=state, config=replace(config, target="pixels", teacher="", loss="mse", decoder_attention="self")
        )
    if "norm.running_mean" in state and (options.command == "import" or options.to != "encoder"):
        raise InputError(f"{source} is a probe, for which no other project has a place: use export … --to encoder")
    if options.command == "import":
        if output.suffix != ".safetensors":
            raise InputError(f"{output} is not a safetensors file: choose a name that ends in .safetensors")
        output.parent.mkdir(parents=True, exist_ok=True)
        pretrained.save(output, state, pretrained.make_metadata(config, classes, multi_label))
        if weights.assumed:
            assumed = ", ".join(f"{name} {getattr(config, name)}" for name in weights.assumed)
            log(f"WARNING: {source} does not say, so assumed: {assumed}", sys.stderr)
        if "head.weight" not in state and config.masking != "adaptive":
            log("WARNING: it has no token sampler: with model.masking=adaptive, one starts from scratch", sys.stderr)
    elif options.push:
        push(weights, source, options.push, options.license)
    elif options.to == "encoder":
        export_encoder(weights, source, output, options.license)
    elif options.to == "huggingface":
        export_huggingface(weights, output)
    else:
        write_weights(output, to_external(state, options.to, config.tubelet_size, config.in_channels))
    num_parameters = sum(value.numel() for value in state.values())
    log(f"wrote {output or options.push}: {num_parameters / 1e6:.1f} M parameters from {source}")


def write_weights(path: Path, state: StateDict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as partial:
        if path.suffix == ".safetensors":
            save_tensors(partial, state, {"format": "pt"})
        elif path.suffix in (".pth", ".pt"):
            with partial.open("wb") as file:  # a name would be written into it, and this one is different every time
                torch.save({"model": state}, file)
        else:
            raise InputError(f"{path} is not a file of weights: choose a name that ends in .safetensors, .pth or .pt")


def export_huggingface(weights: pretrained.Weights, folder: Path) -> None:
    """Write a folder that `VideoMAEForPreTraining` or `VideoMAEForVideoClassification` reads with `from_pretrained`
    and, for RGB, `AutoImageProcessor`, which makes the same clips from raw frames.

    An encoder without a decoder is a `VideoMAEModel`.
    Their last LayerNorm has an epsilon of 1e-5 whatever the configuration says; ours and the authors' have 1e-6.
    """
    state, config, classes, multi_label, _ = weights
    if config.positions != "flat-1d":
        raise InputError(f"Hugging Face's VideoMAE has no {config.positions} positions: this model cannot be exported")
    size = config.dimensions
    is_classifier = "head.weight" in state
    kind = "ForVideoClassification" if is_classifier else "ForPreTraining" if is_pretraining(state) else "Model"
    values = vars(config) | size._asdict()
    hf_config: dict[str, Any] = {
        "model_type": "videomae",
        "architectures": [f"VideoMAE{kind}"],
        **{theirs: values[ours] for ours, theirs in pretrained.HUGGINGFACE_KEYS.items()},
        "intermediate_size": 4 * size.encoder_width,
        "decoder_intermediate_size": 4 * size.decoder_width,
        "layer_norm_eps": 1e-6,
        "use_mean_pooling": is_classifier,
    }
    if is_classifier:
        names = dict(enumerate(classes or (f"LABEL_{i}" for i in range(len(state["head.weight"])))))
        hf_config |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        hf_config |= {"problem_type": "multi_label_classification"} if multi_label else {}
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", hf_config)
    if config.in_channels == 3:  # their processor makes RGB of every frame
        write_json(folder / "preprocessor_config.json", describe_preprocessing(config))
    write_weights(
        folder / "model.safetensors", to_external(state, "huggingface", config.tubelet_size, config.in_channels)
    )


def describe_preprocessing(config: ModelConfig) -> dict[str, Any]:
    """Describe the preprocessing for their image processor: the middle square, scaled."""
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


def export_encoder(weights: pretrained.Weights, source: Path, folder: Path, license: str) -> None:
    """Write `encoder.safetensors` and a README.md on how to use it."""
    encoder = {name: value for name, value in weights.state.items() if name.startswith(pretrained.ENCODER_PARTS)}
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "encoder.safetensors"
    pretrained.save(file, encoder, pretrained.make_metadata(weights.config))
    write_card(file, weights, encoder, source, file.name, license)


def push(weights: pretrained.Weights, source: Path, repo: str, license: str) -> None:
    """Upload all weights, for `load_adamae` and, where their models can be made of them, for transformers and,
    as an encoder of still images, timm.

    transformers' layout has no place for the token sampler: it keeps our names, which transformers passes over.
    """
    state, config, classes, multi_label, _ = weights
    with TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if config.positions == "flat-1d" and "norm.running_mean" not in state:
            export_huggingface(weights, folder)
            sampler = {name: value for name, value in state.items() if name.startswith("token_sampler.")}
            state = to_external(state, "huggingface", config.tubelet_size, config.in_channels) | sampler
        metadata = pretrained.make_metadata(config, classes, multi_label)
        metadata[pretrained.RATE_KEY] = json.dumps(pretrained.trained_rate(source))
        file = folder / "model.safetensors"
        pretrained.save(file, state, metadata)
        if config.in_channels == 3 and "encoder.norm.weight" in weights.state:
            positions = position_table(config.positions, (1, *config.grid[1:]), config.dimensions.encoder_width)
            write_weights(folder / TIMM_FILE, to_timm(weights.state, positions, config.tubelet_size))
        write_card(file, weights, state, source, repo, license)
        push_folder(folder, repo)


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))

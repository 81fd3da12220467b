"""Import and export weights.

    python export.py import CHECKPOINT OUTPUT.safetensors     another project's checkpoint -> this one's layout
    python export.py export RUN OUTPUT --to adamae            the authors' layout, or videomae or huggingface
    python export.py export RUN OUTPUT --to encoder           tokenizer and encoder alone, with a model card
    python export.py export RUN --push user/name              all of it to the Hugging Face Hub, with a model card

RUN is whatever `load_adamae` takes, or a URL: hf://user/name. OUTPUT is a folder for `huggingface` and `encoder`,
else a file: safetensors, or PyTorch's format under the key `model` where its name ends in .pth or .pt, as the authors'
scripts read it.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser
from adamae.common.errors import InputError, parse_early, run_command


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    importing, exporting = commands.add_parser("import"), commands.add_parser("export")
    importing.add_argument("source", metavar="CHECKPOINT")
    importing.add_argument("output", type=Path, metavar="OUTPUT")
    exporting.add_argument("source", metavar="RUN")
    exporting.add_argument("output", type=Path, metavar="OUTPUT", nargs="?")
    exporting.add_argument(
        "--to", choices=("adamae", "videomae", "huggingface", "encoder"), default="encoder"
    )
    exporting.add_argument(
        "--push", metavar="user/name", help="write to the Hugging Face Hub instead of OUTPUT"
    )
    exporting.add_argument(
        "--license", default="other", help="in the model card, such as cc-by-4.0"
    )
    for command in (importing, exporting):
        unsaid = "frames per clip, if the file does not say"
        command.add_argument("--num-frames", type=int, default=16, metavar="T", help=unsaid)
    options = parser.parse_args(arguments)
    if options.command == "export" and (options.output is None) == (options.push is None):
        raise InputError("give OUTPUT or --push user/name, one of them")
    return options


if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Literal

from adamae.common.atomic_io import write_json
from adamae.common.logging import log
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from adamae.model.state_dict import ENCODER_PARTS, StateDict, select
from adamae.model.tokenizer import position_table
from adamae.model.weights.external_layouts import is_pretraining, to_external, to_timm
from adamae.model.weights.hub import TIMM_FILE, push_folder
from adamae.model.weights.pretrained import Weights, load, make_metadata, save
from adamae.model.weights.read_config import HUGGINGFACE_KEYS, trained_rate
from adamae.training.model_card import write_card
from adamae.training.remote_run import local_run


def main(options: argparse.Namespace) -> None:
    source, output = local_run(options.source), options.output
    weights = load(source, options.num_frames)
    if options.command == "import":
        import_weights(weights, source, output)
    else:
        weights = leave_out_decoder(weights)
        if options.push:
            push(weights, source, options.push, options.license)
        elif options.to == "encoder":
            state = select(weights.state, ENCODER_PARTS)
            file = output / "encoder.safetensors"
            save(file, state, make_metadata(weights.config))
            write_card(file, weights, state, source, file.name, options.license)
        elif options.to == "huggingface":
            export_huggingface(weights, output)
        else:
            save(output, convert(weights, options.to))
    num_parameters = sum(value.numel() for value in weights.state.values())
    log(f"wrote {output or options.push}: {num_parameters / 1e6:.1f} M parameters from {source}")


def import_weights(weights: Weights, source: Path, output: Path) -> None:
    """Write weights as one safetensors file with their configuration; warn of what nothing says."""
    if output.suffix != ".safetensors":
        raise InputError(
            f"{output} is not a safetensors file: choose a name that ends in .safetensors"
        )
    state, config, classes, multi_label, assumed = weights
    save(output, state, make_metadata(config, classes=classes, multi_label=multi_label))
    if assumed:
        said = ", ".join(f"{name} {getattr(config, name)}" for name in assumed)
        log(f"WARNING: {source} does not say, so assumed: {said}", sys.stderr)
    if "head.weight" not in state and config.masking != "adaptive":
        log(
            "WARNING: it has no token sampler: with model.masking=adaptive, one starts from scratch",
            sys.stderr,
        )


def leave_out_decoder(weights: Weights) -> Weights:
    """Leave out a decoder, and its sampler, that other projects cannot use."""
    if weights.config.target == "pixels" and weights.config.decoder_attention == "self":
        return weights
    state = {
        k: v for k, v in weights.state.items() if not k.startswith(("decoder.", "token_sampler."))
    }
    plain = replace(
        weights.config, target="pixels", teacher="", loss="mse", decoder_attention="self"
    )
    return weights._replace(state=state, config=plain)


def list_own_features(weights: Weights) -> list[str]:
    """List what no other project has a place for."""
    config = weights.config
    found = {
        "a probe": "norm.running_mean" in weights.state,
        "differences of frames (model.differences)": config.differences,
        f"{config.positions} positions": config.positions != "flat-1d",
    }
    return [feature for feature, is_there in found.items() if is_there]


def convert(weights: Weights, layout: Literal["adamae", "videomae", "huggingface"]) -> StateDict:
    if features := list_own_features(weights):
        raise InputError(
            f"no other project has {' and '.join(features)}: use export … --to encoder"
        )
    return to_external(
        weights.state, layout, weights.config.tubelet_size, weights.config.in_channels
    )


def export_huggingface(weights: Weights, folder: Path) -> None:
    """Write a folder that `VideoMAEForPreTraining` or `VideoMAEForVideoClassification` reads with `from_pretrained`
    and, for RGB, `AutoImageProcessor`, which makes the same clips from raw frames.

    An encoder without a decoder is a `VideoMAEModel`. The last LayerNorm has an epsilon of 1e-5 there, whatever the
    configuration says, instead of 1e-6.
    """
    config, size = weights.config, weights.config.dimensions
    is_classifier = "head.weight" in weights.state
    kind = (
        "ForVideoClassification"
        if is_classifier
        else "ForPreTraining"
        if is_pretraining(weights.state)
        else "Model"
    )
    values = vars(config) | size._asdict()
    described: dict[str, Any] = {
        "model_type": "videomae",
        "architectures": [f"VideoMAE{kind}"],
        **{key: values[name] for name, key in HUGGINGFACE_KEYS.items()},
        "intermediate_size": 4 * size.encoder_width,
        "decoder_intermediate_size": 4 * size.decoder_width,
        "layer_norm_eps": 1e-6,
        "use_mean_pooling": is_classifier,
    }
    if is_classifier:
        names = dict(
            enumerate(
                weights.classes or (f"LABEL_{i}" for i in range(len(weights.state["head.weight"])))
            )
        )
        described |= {"id2label": names, "label2id": {name: i for i, name in names.items()}}
        described |= {"problem_type": "multi_label_classification"} if weights.multi_label else {}
    save(folder / "model.safetensors", convert(weights, "huggingface"))
    write_json(folder / "config.json", described)
    if config.in_channels == 3:  # the processor there makes RGB of every frame
        height, width = config.frame_size  # the middle square, scaled
        preprocessing = {
            "image_processor_type": "VideoMAEImageProcessor",
            "size": {"shortest_edge": height}
            if height == width
            else {"height": height, "width": width},
            "crop_size": {"height": height, "width": width},
            "image_mean": list(IMAGENET_MEAN),
            "image_std": list(IMAGENET_STD),
        }
        write_json(folder / "preprocessor_config.json", preprocessing)


def push(weights: Weights, source: Path, repo: str, license: str) -> None:
    """Upload all weights, for `load_adamae` and, where their models can be made of them, for transformers and,
    as an encoder of still images, timm.

    transformers' layout has no place for the token sampler: it keeps its names, which transformers passes over.
    """
    state, config, classes, multi_label, _ = weights
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.safetensors"
        if not list_own_features(weights):
            export_huggingface(weights, file.parent)
            state = convert(weights, "huggingface") | select(state, "token_sampler.")
        rate = trained_rate(source)
        save(
            file, state, make_metadata(config, classes=classes, multi_label=multi_label, rate=rate)
        )
        if (
            config.in_channels == 3
            and not config.differences
            and "encoder.norm.weight" in weights.state
        ):
            positions = position_table(
                config.positions, (1, *config.grid[1:]), config.dimensions.encoder_width
            )
            save(file.with_name(TIMM_FILE), to_timm(weights.state, positions, config.tubelet_size))
        write_card(file, weights, state, source, repo, license)
        push_folder(file.parent, repo)


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))

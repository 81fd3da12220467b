"""Import and export weights.

    python export.py import CHECKPOINT OUTPUT.safetensors  from another project's layout
    python export.py export RUN OUTPUT --to adamae         or videomae, huggingface: their layouts
    python export.py export RUN OUTPUT --to encoder        tokenizer and encoder, with a model card
    python export.py export RUN --push user/name           all weights to the Hugging Face Hub

RUN is whatever `load_adamae` takes, or a URL: hf://user/name. OUTPUT is a folder for `huggingface`
and `encoder`, else a file: safetensors, or PyTorch's format under the key `model` where its name
ends in .pth or .pt, as the authors' scripts read it.
"""

import argparse
from pathlib import Path

from adamae.common.arguments import ArgumentParser
from adamae.common.errors import InputError, parse_early, run_command
from adamae.common.locations import local_path


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = ArgumentParser(__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    importing = commands.add_parser("import")
    importing.add_argument("source", metavar="CHECKPOINT")
    importing.add_argument("output", type=local_path, metavar="OUTPUT")
    exporting = commands.add_parser("export")
    exporting.add_argument("source", metavar="RUN")
    exporting.add_argument("output", type=local_path, metavar="OUTPUT", nargs="?")
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
        command.add_argument(
            "--num-frames",
            type=int,
            default=16,
            metavar="T",
            help="frames per clip, if the file does not say",
        )
    options = parser.parse_args(arguments)
    if options.command == "export" and (options.output is None) == (options.push is None):
        raise InputError("give OUTPUT or --push user/name, one of them")
    return options


# Mistakes and --help are answered here, before the imports that take seconds.
if __name__ == "__main__":
    OPTIONS = parse_early(parse_arguments)

import sys
from dataclasses import replace
from tempfile import TemporaryDirectory
from typing import Any, Literal

from adamae.common.atomic_io import write_json
from adamae.common.logging import log
from adamae.kernels.patchify import IMAGENET_MEAN, IMAGENET_STD
from adamae.model.config import ModelConfig
from adamae.model.state_dict import ENCODER_PARTS, StateDict, select
from adamae.model.tokenizer import position_table
from adamae.model.weights.external_layouts import (
    is_pretraining,
    list_own_features,
    to_external,
    to_timm,
)
from adamae.model.weights.hub import TIMM_FILE, push_folder
from adamae.model.weights.pretrained import Weights, load, make_metadata, save
from adamae.model.weights.read_config import HUGGINGFACE_KEYS, trained_rate
from adamae.training.model_card import write_card
from adamae.training.remote_run import local_run


def main(options: argparse.Namespace) -> None:
    source = local_run(options.source)
    weights = load(source, options.num_frames)
    if options.command == "import":
        import_weights(weights, source, options.output)
    else:
        weights = drop_own_parts(weights)
        export_weights(weights, source, options)
    destination = options.output or options.push
    num_parameters = sum(value.numel() for value in weights.state.values())
    log(f"wrote {destination}: {num_parameters / 1e6:.1f} M parameters from {source}")
    log(f"next, in Python: {name_loader(options, is_pretraining(weights.state))}")


def name_loader(options: argparse.Namespace, has_decoder: bool) -> str:
    """Return the call that loads what was written."""
    if options.command == "export":
        if options.push and not has_decoder:
            return f'adamae.load_encoder("hf://{options.push}")'
        if options.push:
            return f'adamae.load_adamae("hf://{options.push}")'
        if options.to == "huggingface":
            return f'transformers.VideoMAEModel.from_pretrained("{options.output}")'
    return f'adamae.load_encoder("{options.output}")'


def import_weights(weights: Weights, source: Path, output: Path) -> None:
    """Write weights and their configuration as one safetensors file.

    Warn of what the source does not say.
    """
    if output.suffix != ".safetensors":
        raise InputError(
            f"{output} is not a safetensors file: choose a name that ends in .safetensors"
        )
    state, config, classes, multi_label, assumed = weights
    save(output, state, make_metadata(config, classes=classes, multi_label=multi_label))
    if assumed:
        values = ", ".join(f"{name} {getattr(config, name)}" for name in assumed)
        log(f"WARNING: {source} does not say, so assumed: {values}", sys.stderr)
    if "head.weight" not in state and config.masking != "adaptive":
        consequence = "with model.masking=adaptive, one starts from scratch"
        log(f"WARNING: it has no token sampler: {consequence}", sys.stderr)


def export_weights(weights: Weights, source: Path, options: argparse.Namespace) -> None:
    if options.push:
        push(weights, source, options.push, options.license)
    elif options.to == "encoder":
        state = select(weights.state, ENCODER_PARTS)
        file = options.output / "encoder.safetensors"
        save(file, state, make_metadata(weights.config))
        write_card(file, weights, state, source, file.name, options.license)
    elif options.to == "huggingface":
        export_huggingface(weights, options.output)
    else:
        save(options.output, convert(weights, options.to))


def drop_own_parts(weights: Weights) -> Weights:
    """Remove what no other project can use.

    That is the projector of views, and a decoder with its sampler unless it is like VideoMAE's,
    which predicts pixels by self-attention among all tokens.
    """
    config = weights.config
    prefixes = ["views."]
    changes: dict[str, Any] = {"views": 1}
    if config.target != "pixels" or config.decoder_attention != "self":
        prefixes += ["decoder.", "token_sampler."]
        changes |= {"target": "pixels", "teacher": "", "loss": "mse", "decoder_attention": "self"}
    state = {k: value for k, value in weights.state.items() if not k.startswith(tuple(prefixes))}
    return weights._replace(state=state, config=replace(config, **changes))


def list_own_parts(weights: Weights) -> list[str]:
    """Return what these weights have and no other project's layout has a place for."""
    parts = list_own_features(weights.config)
    if "norm.running_mean" in weights.state:
        parts.append("a probe")
    return parts


def convert(weights: Weights, layout: Literal["adamae", "videomae", "huggingface"]) -> StateDict:
    """Return the weights in another layout; raise InputError if it has no place for some."""
    parts = list_own_parts(weights)
    if parts:
        raise InputError(f"no other project has {' and '.join(parts)}: use export … --to encoder")
    config = weights.config
    return to_external(weights.state, layout, config.tubelet_size, config.in_channels)


def export_huggingface(weights: Weights, folder: Path) -> None:
    """Write a folder for `VideoMAEForPreTraining` or `VideoMAEForVideoClassification`.

    Their `from_pretrained` reads it and, for RGB, `AutoImageProcessor`'s, which then makes the same
    clips from raw frames. An encoder without a decoder is a `VideoMAEModel`. The last LayerNorm has
    an epsilon of 1e-5 there, whatever the configuration says, instead of 1e-6.
    """
    save(folder / "model.safetensors", convert(weights, "huggingface"))
    write_json(folder / "config.json", describe_for_huggingface(weights))
    # The processor there makes RGB of every frame.
    if weights.config.in_channels == 3:
        write_json(folder / "preprocessor_config.json", describe_preprocessing(weights.config))


def describe_for_huggingface(weights: Weights) -> dict[str, Any]:
    """Return the content of config.json: a `VideoMAEConfig`."""
    is_classifier = "head.weight" in weights.state
    if is_classifier:
        architecture = "VideoMAEForVideoClassification"
    elif is_pretraining(weights.state):
        architecture = "VideoMAEForPreTraining"
    else:
        architecture = "VideoMAEModel"
    dimensions = weights.config.dimensions
    values = vars(weights.config) | dimensions._asdict()
    description: dict[str, Any] = {
        "model_type": "videomae",
        "architectures": [architecture],
        **{key: values[name] for name, key in HUGGINGFACE_KEYS.items()},
        "intermediate_size": 4 * dimensions.encoder_width,
        "decoder_intermediate_size": 4 * dimensions.decoder_width,
        "layer_norm_eps": 1e-6,
        "use_mean_pooling": is_classifier,
    }
    if is_classifier:
        # transformers' own names for classes without a name.
        classes = weights.classes or [
            f"LABEL_{i}" for i in range(len(weights.state["head.weight"]))
        ]
        description["id2label"] = dict(enumerate(classes))
        description["label2id"] = {name: class_id for class_id, name in enumerate(classes)}
        if weights.multi_label:
            description["problem_type"] = "multi_label_classification"
    return description


def describe_preprocessing(config: ModelConfig) -> dict[str, Any]:
    """Return the content of preprocessor_config.json: frames are scaled, cropped and normalized."""
    height, width = config.frame_size
    clip_size = {"height": height, "width": width}
    return {
        "image_processor_type": "VideoMAEImageProcessor",
        # The processor keeps the aspect ratio of frames only if it is to make squares.
        "size": {"shortest_edge": height} if height == width else clip_size,
        "crop_size": clip_size,
        "image_mean": list(IMAGENET_MEAN),
        "image_std": list(IMAGENET_STD),
    }


def push(weights: Weights, source: Path, repo: str, license: str) -> None:
    """Upload all weights to the Hub as `load_adamae` reads them.

    Where their models can be made of the weights, transformers reads them too, and timm the encoder
    as one of still images. transformers' layout has no place for the token sampler: its tensors
    keep their names, which transformers passes over.
    """
    state, config, classes, multi_label, _ = weights
    with TemporaryDirectory() as temporary:
        file = Path(temporary) / "model.safetensors"
        if not list_own_parts(weights):
            export_huggingface(weights, file.parent)
            state = convert(weights, "huggingface") | select(state, "token_sampler.")
        # There is no config.yaml on the Hub, so the metadata say at which rate frames were sampled.
        rate = trained_rate(source)
        metadata = make_metadata(config, classes=classes, multi_label=multi_label, rate=rate)
        save(file, state, metadata)
        has_timm_encoder = "encoder.norm.weight" in weights.state
        if has_timm_encoder and config.in_channels == 3 and not config.differences:
            # A still image is one token frame.
            grid = (1, *config.grid[1:])
            positions = position_table(config.positions, grid, config.dimensions.encoder_width)
            timm_state = to_timm(weights.state, positions, config.tubelet_size)
            save(file.with_name(TIMM_FILE), timm_state)
        write_card(file, weights, state, source, repo, license)
        push_folder(file.parent, repo)


if __name__ == "__main__":
    run_command(lambda: main(OPTIONS))

"""The configuration: what is refused, in which words, and what is read back."""

import dataclasses
import io
import re
from collections.abc import Callable
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

import adamae.training.config
from adamae.common.errors import InputError
from adamae.training.config import TrainConfig, differences, parse, to_yaml
from adamae.training.schedule import Schedule


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optimizer.beta1=1", "optimizer.beta1 is 1.0: must be at least 0 and below 1"),
        ("data.fps=.inf", "data.fps is inf: must be finite, above 0, or null"),
        (
            "mask_ratio=1",
            "there is no key mask_ratio: did you mean model.mask_ratio? `train.py --help`",
        ),
        ("modle.size=tiny", "there is no key modle.size: did you mean model.size"),
        ("evaluation.every=0", "evaluation.every is 0: must be at least 1, or null"),
        ("batch_size=many", "batch_size is many: must be int; `train.py --help` lists every key"),
        ("model.image_size=big", "model.image_size is big: must be int | list[int];"),
        ("compile=maybe", "compile is maybe: must be Union[bool, Literal['reduce-overhead']];"),
        ("metrics=[tensorboard]", "there is no key metrics: `train.py --help` lists every key"),
        ("model=tiny", "model is a section: set one of its keys, model.KEY"),
        (
            "--config configs/demo.yml",
            "--config configs/demo.yml is no file: did you mean configs/demo.yaml?",
        ),
        (
            "model.num_frames=15",
            "model.num_frames (15) is not a multiple of model.tubelet_size (2)",
        ),
        ("model.image_size=225", "model.image_size (225)"),
        ("model.image_size=[224,100]", "model.image_size ([224, 100])"),
        (
            "model.image_size=[224,224,224]",
            "model.image_size is [224, 224, 224]: must be a whole number",
        ),
        (
            "model.masking=diagonal",
            "model.masking is diagonal: must be Literal['adaptive', 'random',",
        ),
        ("precision=fp16", "precision is fp16: must be Literal['bf16', 'fp32'];"),
        (
            "task=finetune model.activation_checkpointing=true",
            "activation_checkpointing is for pre-training",
        ),
        ("model.mask_ratio=1.0", "model.mask_ratio is 1.0"),
        ("model.mask_ratio=0.9999", "leaves 0 of 1568 tokens visible"),
        (
            "model.masking=frame model.mask_ratio=0.9",
            "leaves 0 of 1568 tokens visible under frame masking",
        ),
        ("model.decoder_depth=0", "model.decoder_depth is 0"),
        ("model.encoder_heads=5", "change model.encoder_width"),
        ("model.sampler_width=20", "change model.sampler_width"),
        ("model.sampler=mlp model.sampler_depth=2", "model.sampler_depth is 2"),
        ("model.decoder_share=0.0", "decoder_share is 0"),
        ("model.decoder_share=0.0001", "leaves none of 1490 masked tokens"),
        ("model.in_channels=13", "in_channels is 13: must be at least 1 and at most 12"),
        ("model.target=teacher", "needs model.teacher"),
        ("model.teacher=x", "does nothing with model.target=pixels"),
        (
            "model.target=motion-energy model.loss=cosine",
            "choose mse or l1 with model.target=motion-energy",
        ),
        (
            "model.target=motion-energy model.num_frames=1 model.tubelet_size=1",
            "motion-energy needs two frames",
        ),
        ("data.shards=", "data.shards is empty"),
        (
            "data.fps=8 data.frame_stride=2",
            "data.fps is 8 and data.frame_stride 2: set one of them to null",
        ),
        ("data.fps=8 data.sampling=segments", "data.fps does nothing with data.sampling=segments"),
    ],
)
def test_bad_values_are_one_sentence(override: str, message: str) -> None:
    with pytest.raises(InputError) as raised:
        parse(["data.shards=s", *override.split()])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_overrides_stand_above_files_wherever_they_are(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("model:\n  size: small\nseed: 7\n")
    config = parse(["seed=2", "--config", str(file), "data.shards=s"])
    assert (config.model.size, config.seed) == ("small", 2)
    file.write_text("quux: {}\n")
    message = r"x.yaml: there is no key quux: `train.py --help` lists every key$"
    with pytest.raises(InputError, match=message):
        parse(["--config", str(file)])


def test_every_key_is_explained_by_the_text_below_its_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for action in adamae.training.config._parser()._actions:
        assert action.help, f"{action.dest} has no docstring below it"
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    sections = ("One run", "Where clips come from", "Architecture and objective")
    offsets = [text.index(section) for section in sections]
    assert offsets == sorted(offsets)
    # A text of two lines.
    timeout = "and is named; ten times that while one reads or writes the run's files"
    assert f"{timeout} (type: float" in text
    assert "Path to a configuration file" not in text, "a section is no file"


@pytest.mark.parametrize(
    "name", ["own", "continue_small", "finetune_small", "few_clips", "k400_pretrain", "demo"]
)
def test_a_short_run_is_not_all_warm_up_and_learns(name: str) -> None:
    config = parse(["--config", f"configs/{name}.yaml", "data.shards=s", "steps=320"])
    schedule = Schedule(config, clips_per_epoch=300)
    assert schedule.warmup_steps <= 32
    assert max(map(schedule.lr, range(320))) == schedule.peak_lr >= 1e-4


def test_only_keys_that_change_results_count_as_different() -> None:
    config = parse(["data.shards=s"])
    earlier = yaml.safe_load(to_yaml(config))
    assert differences(dataclasses.replace(config, log_every=3, run="elsewhere"), earlier) == []
    assert differences(dataclasses.replace(config, seed=1), earlier) == ["seed: 0 -> 1"]
    assert differences(dataclasses.replace(config, global_batch=64), earlier) == []


# Options of each kind: text, a size, a number or null, a list.
OVERRIDES = ["data.shards=s", "model.size=small", "data.fps=8", "model.image_size=[128,256]"]


def print_config(*overrides: str) -> str:
    """Return what `train.py --print_config` prints."""
    with pytest.raises(SystemExit) as ended, redirect_stdout(io.StringIO()) as printed:
        parse([*overrides, "--print_config"])
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("as_text", [to_yaml, lambda config: print_config(*OVERRIDES)])
def test_a_printed_configuration_reads_back(
    as_text: Callable[[TrainConfig], str], tmp_path: Path
) -> None:
    config = parse(OVERRIDES)
    file = tmp_path / "config.yaml"
    file.write_text(as_text(config))
    assert parse(["--config", str(file)]) == config


def test_frames_need_not_be_square() -> None:
    config = parse(["data.shards=s", "model.image_size=[128,256]"])
    assert config.model.image_size == [128, 256]
    assert config.model.frame_size == (128, 256)
    assert config.model.grid == (8, 8, 16)
    assert parse(["data.shards=s", "model.image_size=[224,224]"]) == parse(["data.shards=s"])


def test_the_file_of_defaults_is_generated() -> None:
    printed = print_config()
    written = Path("configs/defaults.yaml").read_text()
    # Python 3.14 prints types in another way.
    types = re.compile(r"\(type: .*, default: ")
    assert types.sub("", printed) == types.sub("", written), (
        "run `python train.py --print_config > configs/defaults.yaml`"
    )

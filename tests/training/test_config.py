import dataclasses
import io
import re
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import yaml

import adamae.training.config
from adamae.common.errors import InputError
from adamae.training.config import differences, parse, to_yaml
from adamae.training.schedule import Schedule


@pytest.mark.parametrize(
    ("override", "says"),
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
def test_bad_values_are_one_sentence(override, says):
    with pytest.raises(InputError) as raised:
        parse(["data.shards=s", *override.split()])
    assert says in str(raised.value)
    assert "\n" not in str(raised.value)


def test_overrides_stand_above_files_wherever_they_are(tmp_path):
    file = tmp_path / "x.yaml"
    file.write_text("model:\n  size: small\nseed: 7\n")
    config = parse(["seed=2", "--config", str(file), "data.shards=s"])
    assert (config.model.size, config.seed) == ("small", 2)
    file.write_text("quux: {}\n")
    with pytest.raises(
        InputError, match=r"x.yaml: there is no key quux: `train.py --help` lists every key$"
    ):
        parse(["--config", str(file)])


def test_every_key_is_explained_by_the_text_below_its_field(capsys):
    for action in adamae.training.config._parser()._actions:
        assert action.help, f"{action.dest} has no docstring below it"
    with pytest.raises(SystemExit) as ended:
        parse(["--help"])
    assert ended.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert (
        text.index("One run")
        < text.index("Where clips come from")
        < text.index("Architecture and objective")
    )
    assert (
        "seconds after which a rank that does not answer ends the run, and is named (type: float"
        in text
    )
    assert text.count("Path to a configuration file") == 0, "of sections"


@pytest.mark.parametrize(
    "name", ["own", "continue_small", "finetune_small", "few_clips", "k400_pretrain", "demo"]
)
def test_a_short_run_is_not_all_warm_up_and_learns(name):
    schedule = Schedule(
        parse(["--config", f"configs/{name}.yaml", "data.shards=s", "steps=320"]),
        clips_per_epoch=300,
    )
    assert schedule.warmup_steps <= 32
    assert max(map(schedule.lr, range(320))) == schedule.peak_lr >= 1e-4


def test_only_keys_that_change_results_count_as_different():
    config = parse(["data.shards=s"])
    earlier = yaml.safe_load(to_yaml(config))
    assert differences(dataclasses.replace(config, log_every=3, run="elsewhere"), earlier) == []
    assert differences(dataclasses.replace(config, seed=1), earlier) == ["seed: 0 -> 1"]
    assert differences(dataclasses.replace(config, global_batch=64), earlier) == []


OVERRIDES = ["data.shards=s", "model.size=small", "data.fps=8", "model.image_size=[128,256]"]


def print_config(*overrides: str) -> str:
    with pytest.raises(SystemExit) as ended, redirect_stdout(io.StringIO()) as printed:
        parse([*overrides, "--print_config"])
    assert ended.value.code == 0
    return printed.getvalue()


@pytest.mark.parametrize("as_text", [to_yaml, lambda config: print_config(*OVERRIDES)])
def test_a_printed_configuration_reads_back(as_text, tmp_path):
    file, config = tmp_path / "config.yaml", parse(OVERRIDES)
    file.write_text(as_text(config))
    assert parse(["--config", str(file)]) == config


def test_frames_need_not_be_square():
    config = parse(["data.shards=s", "model.image_size=[128,256]"])
    assert (config.model.image_size, config.model.frame_size, config.model.grid) == (
        [128, 256],
        (128, 256),
        (8, 8, 16),
    )
    assert parse(["data.shards=s", "model.image_size=[224,224]"]) == parse(["data.shards=s"])


def test_the_file_of_defaults_is_generated():
    printed, written = print_config(), Path("configs/defaults.yaml").read_text()
    types = re.compile(r"\(type: .*, default: ")  # which Python 3.14 prints in another way
    assert types.sub("", printed) == types.sub("", written), (
        "run `python train.py --print_config > configs/defaults.yaml`"
    )

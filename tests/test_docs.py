"""Check README and docs against the code.

Commands are accepted by their programs, Python blocks run, links resolve, metrics are explained.
"""

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    TrainingArguments,
    VideoMAEConfig,
    VideoMAEForVideoClassification,
    VideoMAEImageProcessor,
)
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from adamae.common.commands import COMMANDS
from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.pipeline.loader import COUNTERS
from adamae.shard_tools.make_shards import parse_arguments as parse_shard_arguments
from adamae.training.config import parse

ROOT = Path(__file__).parents[1]
TOP = ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")
PAGES = [*(ROOT / f"{name}.md" for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
# Its commands belong to the commits that it names, so only its links are checked.
NOTEBOOK = ROOT / "benchmarks/experiments.md"
# Programs that need not be installed; only the files that their commands name are checked.
OTHER_PROGRAMS = {"docker", "sbatch", "sky", "kubectl", "pip", "apt-get", "source", "hf", "git"}
METRICS = (
    "step",
    "lr",
    "loss",
    "grad_norm",
    "data_wait_fraction",
    "evaluation/knn_top1",
    "evaluation/rankme",
)


def list_code_blocks(page: Path, *languages: str) -> list[str]:
    """Return the fenced blocks of a page in any of the languages; "" is that of a plain block."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for language, block in blocks if language in languages]


def list_commands() -> list[str]:
    """Return the commands of all pages, in blocks and between backticks, each once.

    Lines that are continued by a backslash are joined.
    """
    commands = []
    for page in PAGES:
        for block in list_code_blocks(page, "", "sh", "bash"):
            lines = block.replace("\\\n", " ").splitlines()
            # Other lines are comments, settings, or what a command prints.
            commands += [line for line in lines if re.match(r"[a-z./]+ ", line)]
        commands += re.findall(r"`((?:python|make) [^`]*)`", page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(commands))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, synthetic_shards: Path) -> Path:
    """Make a folder with links to all of this repository, and what the pages name beside it.

    That is shards/mine, and the checkpoint of a run in runs/mine.
    """
    folder = tmp_path_factory.mktemp("project")
    for entry in ROOT.iterdir():
        if entry.name not in ("shards", "runs"):
            (folder / entry.name).symlink_to(entry)
    (folder / "shards").mkdir()
    (folder / "shards/mine").symlink_to(synthetic_shards)
    checkpoint = folder / "runs/mine/checkpoints/step-00000001"
    checkpoint.mkdir(parents=True)
    model = AdaMAE(ModelConfig("tiny"))
    save_file(model.state_dict(), checkpoint / "model.safetensors")
    # JSON is YAML, too.
    config = json.dumps({"model": vars(model.config), "data": {"frame_stride": 4}})
    (folder / "runs/mine/config.yaml").write_text(config)
    return folder


class ParsedError(BaseException):
    """Raised when a program has parsed its arguments, so that it does not start to work.

    It is no Exception, so that no program takes it for an error of its own.
    """


def run_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python SCRIPT …` or `python -m MODULE …` in this process, without the word python.

    Raise SystemExit unless its exit code is 0.
    """
    run: Callable[..., Any] = runpy.run_path
    if words[0] == "-m":
        run = runpy.run_module
        words = words[1:]
    name = words[0]
    monkeypatch.setattr(sys, "argv", words)
    monkeypatch.syspath_prepend(str(Path(name).parent))
    try:
        run(name, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


@pytest.mark.parametrize("command", list_commands())
def test_every_command_is_accepted(
    command: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = shlex.split(command, comments=True)
    if ">" in words:
        words = words[: words.index(">")]
    if words[0] == "make":
        check_targets(words[1:])
    elif words[0] == "adamae":
        check_command(words[1], words[2:], monkeypatch)
    elif words[0] in OTHER_PROGRAMS:
        for word in words:
            if word.startswith(("launch/", "configs/")):
                assert Path(word).exists(), word
    else:
        assert words[0] in ("python", "torchrun"), "a program that this test does not know"
        # `python -m venv` has no parser of this project.
        if "venv" not in words:
            check_arguments(words[1:], monkeypatch)


def check_command(name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check the arguments of `adamae NAME`."""
    if name not in ("demo", "start"):
        check_arguments([COMMANDS[name].file, *words], monkeypatch)
        return
    # These would run other commands. What they do not know is for make_shards.py.
    _, shard_words = import_module(f"adamae.{name}").parse_arguments(words)
    if shard_words:
        parse_shard_arguments([*shard_words, "shards"])


def check_targets(words: list[str]) -> None:
    """Check that the Makefile has the targets of a command; the other words are variables."""
    makefile = Path("Makefile").read_text()
    for word in words:
        if "=" not in word:
            assert re.search(rf"^{word}:", makefile, re.M), word


def check_arguments(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a program of this project until it has parsed its arguments."""
    # Options of torchrun stand before the script.
    if words[0] != "-m":
        script = next(word for word in words if word.endswith(".py"))
        words = words[words.index(script) :]
    # What the pages leave to the reader, or leave out.
    words = [word.replace("FILE", "configs/own.yaml").replace("…", "x") for word in words]
    for parser in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
        monkeypatch.setattr(parser, "parse_args", stop_after(parser.parse_args))
    intermixed = argparse.ArgumentParser.parse_intermixed_args
    monkeypatch.setattr(argparse.ArgumentParser, "parse_intermixed_args", stop_after(intermixed))
    with contextlib.suppress(ParsedError):
        run_program(words, monkeypatch)
    # doctor.py passes settings to train.py's parser, after it has parsed its own arguments.
    if words[0] == "doctor.py":
        monkeypatch.undo()
        settings = [word for word in words if "=" in word]
        parse(["data.shards=s", *settings])


def stop_after(parse_args: Callable[..., Any]) -> Callable[..., None]:
    """Return a function that parses and then raises ParsedError."""

    def parse_and_stop(*arguments: Any, **options: Any) -> None:
        parse_args(*arguments, **options)
        raise ParsedError

    return parse_and_stop


def list_anchors(page: Path) -> list[str]:
    """Return the anchors that GitHub gives to the titles of a page: "On an H200" is on-an-h200."""
    anchors = []
    for title in re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.M):
        letters = re.sub(r"[^\w -]", "", title.lower())
        anchors.append(letters.replace(" ", "-"))
    return anchors


@pytest.mark.parametrize("page", [*PAGES, NOTEBOOK], ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8")):
        # Tests have no network.
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        if anchor:
            assert anchor in list_anchors(linked), target


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 110
    for page in (ROOT / "docs").glob("*.md"):
        assert f"docs/{page.name}" in readme


def test_every_metric_is_explained() -> None:
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    counters = [f"pipeline/{counter}" for counter in COUNTERS]
    for name in (*METRICS, *counters):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    "page", [page for page in PAGES if list_code_blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_blocks_run(page: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    names: dict[str, Any] = {}
    # A later block may use the names of an earlier one.
    for block in list_code_blocks(page, "python"):
        exec(compile(block, page.name, "exec"), names)
    # The page that normalizes clips for Hugging Face's models does what their processor does.
    if "pixel_values" in names:
        clip = names["batch"].clip[0]
        processor = VideoMAEImageProcessor(
            image_mean=IMAGENET_DEFAULT_MEAN, image_std=IMAGENET_DEFAULT_STD
        )
        processed = processor(list(clip.permute(0, 3, 1, 2)), return_tensors="pt")
        expected = processed["pixel_values"][0]
        torch.testing.assert_close(names["pixel_values"][0], expected, atol=1e-4, rtol=0)


# Hugging Face's Trainer takes seconds to start.
@pytest.mark.slow
def test_hugging_faces_trainer_takes_clips_as_the_page_says(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    names: dict[str, Any] = {}
    for block in list_code_blocks(ROOT / "docs/training.md", "python"):
        exec(block, names)
    clips = names["clips"]
    model = VideoMAEForVideoClassification(
        VideoMAEConfig(
            hidden_size=24,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_labels=len(clips.classes),
        )
    )
    arguments = TrainingArguments("runs/trainer", max_steps=2, report_to="none", use_cpu=True)
    before = clips.state_dict()["next_batch"]
    trained = names["ClipTrainer"](model, arguments, train_dataset=clips).train()
    assert trained.global_step == 2
    assert 0 < trained.training_loss < 10
    assert clips.state_dict()["next_batch"] >= before + 2


# Slow, since it trains for a minute.
@pytest.mark.slow
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs/first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
    blocks = []
    for cell in cells:
        if cell["cell_type"] == "code":
            # Stored outputs would make every run of the notebook a change.
            assert not cell["outputs"]
            assert not cell["execution_count"]
            blocks.append("".join(cell["source"]))
    program = tmp_path / "notebook.py"
    program.write_text("\n".join(blocks))
    environment = os.environ | {"FIRST_HOUR": str(tmp_path / "out")}
    subprocess.run([sys.executable, program], cwd=ROOT / "docs", env=environment, check=True)
    assert len(list(tmp_path.glob("out/features/*/*.safetensors"))) == 64
    assert len(list(tmp_path.glob("out/features/search/*.png"))) == 1
    assert len(list(tmp_path.glob("out/figures/*.png"))) == 1
    assert (tmp_path / "out/comparison/compare.html").is_file()


def write_recorder(python: Path, recorded: Path, code: Path) -> None:
    """Write a stand-in for Python that runs nothing.

    It appends the number of its arguments and each of them to `recorded`, a line each, and writes
    the program that `python -` reads to `code`.
    """
    lines = [
        "#!/bin/sh",
        f'printf "%s\\n" "$#" "$@" >> {recorded}',
        f'[ "$1" = - ] && cat > {code} || true',
    ]
    python.write_text("\n".join(lines) + "\n")
    python.chmod(0o755)


def read_commands(recorded: Path) -> list[list[str]]:
    """Return the arguments of each command that the stand-in has recorded."""
    lines = iter(recorded.read_text().splitlines())
    commands = []
    for count in lines:
        command = [next(lines) for _ in range(int(count))]
        commands.append(command)
    return commands


# Slow: nine commands, three of them trainings.
@pytest.mark.slow
def test_the_tutorial_script(
    synthetic_videos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Record the script's commands with small numbers, then run them in this process.

    A process for each would import torch nine times.
    """
    # As outside of tests.
    monkeypatch.setattr("adamae.kernels.launch.triton_on_cpu", False)
    recorded = tmp_path / "commands"
    code = tmp_path / "code.py"
    python = tmp_path / "python"
    write_recorder(python, recorded, code)
    small = {
        "PYTHON": str(python),
        "STEPS": "2",
        "IMAGE": "32",
        "FRAMES": "4",
        "BATCH": "4",
        "PATH": "/usr/bin:/bin",
    }
    out = tmp_path / "out"
    script = ["bash", str(ROOT / "docs/first_hour.sh"), str(synthetic_videos), str(out)]
    subprocess.run(script, env=small, check=True)
    monkeypatch.chdir(ROOT)
    fast = {"doctor.py": ["--seconds", "0.05"], "train.py": ["data.num_workers=1"]}
    commands = read_commands(recorded)
    # What doctor.py estimates is the run that follows.
    doctor = next(command for command in commands if command[0] == "doctor.py")
    train = next(command for command in commands if command[0] == "train.py")
    assert sorted(doctor[2:]) == sorted(word for word in train[1:] if not word.startswith("run="))
    for command in commands:
        if command[0] == "-":
            monkeypatch.setattr(sys, "argv", command)
            exec(compile(code.read_text(), "first_hour", "exec"), {})
        else:
            run_program([*command, *fast.get(command[0], [])], monkeypatch)
    assert (out / "pretrain/report.html").is_file()
    # Of 16 videos, one of each class is held out.
    assert len(list((out / "figures").glob("*.png"))) == 4
    assert (out / "finetune/evaluation/results.json").is_file()
    assert (out / "features/features.json").is_file()
    assert "image_size: 48\n" in (out / "larger/config.yaml").read_text()
    assert f"{out}/huggingface" in capsys.readouterr().err
    assert (out / "larger_features/features.json").is_file()

"""Check README and docs: commands are accepted by their programs, Python blocks run, links resolve, and metrics are
explained; nowhere do words stand that do not say what is meant."""

import argparse
import contextlib
import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import jsonargparse
import pytest
import torch
from safetensors.torch import save_file
from transformers import VideoMAEImageProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from adamae.model.adamae import AdaMAE
from adamae.model.config import ModelConfig
from adamae.pipeline.loader import COUNTERS
from adamae.training.config import parse

ROOT = Path(__file__).parents[1]
TOP = ("README", "AGENTS", "CHANGELOG", "CONTRIBUTING", "SECURITY")
PAGES = [*(ROOT / f"{name}.md" for name in TOP), *sorted((ROOT / "docs").glob("*.md"))]
# Its commands belong to the commits that it names, so only its links are checked.
NOTEBOOK = ROOT / "benchmarks/experiments.md"
OTHER_PROGRAMS = {"docker", "sbatch", "sky", "kubectl", "pip", "apt-get", "source", "hf"}
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
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S)
    return [block for language, block in blocks if language in languages]


def list_commands() -> list[str]:
    """Return the commands of all pages, in blocks and between backticks, continued lines joined, each once."""
    commands = []
    for page in PAGES:
        blocks = [block.replace("\\\n", " ") for block in list_code_blocks(page, "", "sh", "bash")]
        commands += [
            line for block in blocks for line in block.splitlines() if re.match(r"[a-z./]+ ", line)
        ]
        commands += re.findall(r"`((?:python|make) [^`]*)`", page.read_text(encoding="utf-8"))
    return list(dict.fromkeys(commands))


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, synthetic_shards: Path) -> Path:
    """Make a folder with all of this repository, and shards/mine and runs/mine, which the pages name."""
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
    (folder / "runs/mine/config.yaml").write_text(
        json.dumps({"model": vars(model.config)})
    )  # JSON is YAML
    return folder


class ParsedError(BaseException):
    """Raised when a program has parsed its arguments, so that it does not start to work."""


def run_program(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run `python SCRIPT …` or `python -m MODULE …` in this process; raises SystemExit unless its exit code is 0."""
    is_module = words[0] == "-m"
    name, *arguments = words[is_module:]
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(Path(name).parent))
    try:
        (runpy.run_module if is_module else runpy.run_path)(name, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise


@pytest.mark.parametrize("command", list_commands())
def test_every_command_is_accepted(
    command: str, project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(project)
    words = shlex.split(command, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert all(
            re.search(rf"^{target}:", Path("Makefile").read_text(), re.M) for target in targets
        )
    elif words[0] in OTHER_PROGRAMS:
        assert all(
            Path(word).exists() for word in words if word.startswith(("launch/", "configs/"))
        )
    else:
        assert words[0] in ("python", "torchrun"), "a program that this test does not know"
        start = (
            1
            if words[1] == "-m"
            else next(i for i, word in enumerate(words) if word.endswith(".py"))
        )
        if "venv" in words:  # no arguments to parse
            return
        for parser in (argparse.ArgumentParser, jsonargparse.ArgumentParser):
            monkeypatch.setattr(parser, "parse_args", _stop_after(parser.parse_args))
        intermixed = argparse.ArgumentParser.parse_intermixed_args
        monkeypatch.setattr(
            argparse.ArgumentParser, "parse_intermixed_args", _stop_after(intermixed)
        )
        words = [word.replace("FILE", "configs/own.yaml").replace("…", "x") for word in words]
        with contextlib.suppress(ParsedError):
            run_program(words[start:], monkeypatch)
        if words[start] == "doctor.py":  # which passes these on to train.py's parser
            monkeypatch.undo()
            parse(["data.shards=s", *(word for word in words if "=" in word)])


def _stop_after(parse_args):
    def parse_and_stop(*arguments, **options):
        parse_args(*arguments, **options)
        raise ParsedError

    return parse_and_stop


@pytest.mark.parametrize("page", [*PAGES, NOTEBOOK], ids=lambda page: page.name)
def test_every_link_resolves(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        assert target.startswith("https://") or (page.parent / path).exists(), target
        if anchor and not target.startswith("https://"):
            text = (page.parent / path if path else page).read_text(encoding="utf-8")
            titles = re.findall(r"^#+ (.*)$", text, re.M)
            assert anchor in [
                re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles
            ], target


def test_the_readme_lists_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 110
    assert all(f"docs/{page.name}" in readme for page in (ROOT / "docs").glob("*.md"))


def test_every_metric_is_explained() -> None:
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    for name in (*METRICS, *(f"pipeline/{counter}" for counter in COUNTERS)):
        assert f"`{name}`" in text, name


@pytest.mark.parametrize(
    "page", [page for page in PAGES if list_code_blocks(page, "python")], ids=lambda page: page.name
)
def test_the_python_blocks_run(page: Path, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(project)
    names: dict[str, Any] = {}
    for block in list_code_blocks(page, "python"):  # one after another
        exec(compile(block, page.name, "exec"), names)
    if "pixel_values" in names:
        clip, found = names["batch"].clip[0], names["pixel_values"][0]
        processor = VideoMAEImageProcessor(
            image_mean=IMAGENET_DEFAULT_MEAN, image_std=IMAGENET_DEFAULT_STD
        )
        processed = processor(list(clip.permute(0, 3, 1, 2)), return_tensors="pt")
        torch.testing.assert_close(found, processed["pixel_values"][0], atol=1e-4, rtol=0)


@pytest.mark.slow  # it trains for a minute
def test_the_notebook_runs_from_top_to_bottom(tmp_path: Path) -> None:
    cells = json.loads((ROOT / "docs/first_hour.ipynb").read_text(encoding="utf-8"))["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert not any(cell["outputs"] or cell["execution_count"] for cell in code)
    (tmp_path / "notebook.py").write_text("\n".join("".join(cell["source"]) for cell in code))
    environment = os.environ | {"FIRST_HOUR": str(tmp_path / "out")}
    subprocess.run(
        [sys.executable, tmp_path / "notebook.py"], cwd=ROOT / "docs", env=environment, check=True
    )
    assert len(list(tmp_path.glob("out/features/*.safetensors"))) == 32
    assert len(list(tmp_path.glob("out/figures/*.png"))) == 1


@pytest.mark.slow  # nine commands, three of them trainings
def test_the_tutorial_script(synthetic_videos: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """Record the script's commands by a stand-in for Python, then run them in this process, with small numbers."""
    monkeypatch.setattr("adamae.kernels.launch.triton_on_cpu", False)  # as outside of tests
    recorded, code = tmp_path / "commands", tmp_path / "code.py"
    python = tmp_path / "python"
    python.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$#" "$@" >> {recorded}\n[ "$1" = - ] && cat > {code} || true\n'
    )
    python.chmod(0o755)
    small = {
        "PYTHON": str(python),
        "STEPS": "2",
        "IMAGE": "32",
        "FRAMES": "4",
        "BATCH": "4",
        "PATH": "/usr/bin:/bin",
    }
    out = tmp_path / "out"
    subprocess.run(
        ["bash", str(ROOT / "docs/first_hour.sh"), str(synthetic_videos), str(out)],
        env=small,
        check=True,
    )
    monkeypatch.chdir(ROOT)
    words = iter(recorded.read_text().splitlines())
    for count in words:
        command = [next(words) for _ in range(int(count))]
        if command[0] == "-":
            monkeypatch.setattr(sys, "argv", command)
            exec(compile(code.read_text(), "first_hour", "exec"), {})
        else:
            fast = {"doctor.py": ["--seconds", "0.05"], "train.py": ["data.num_workers=1"]}
            run_program([*command, *fast.get(command[0], ())], monkeypatch)
    assert (out / "pretrain/report.html").is_file()
    assert (
        len(list((out / "figures").glob("*.png"))) == 2
    )  # of 16 videos, one of each class is held out
    assert (out / "finetune/evaluation/results.json").is_file()
    assert (out / "features/features.json").is_file()
    assert "image_size: 48\n" in (out / "larger/config.yaml").read_text()
    assert f"{out}/huggingface" in capsys.readouterr().err
    assert (out / "larger_features/features.json").is_file()

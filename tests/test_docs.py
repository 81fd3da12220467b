"""What README and docs/ say can be done: every command is read as its program reads it, every link leads somewhere."""

import argparse
import re
import runpy
import shlex
import subprocess
import sys
from pathlib import Path

import jsonargparse
import pytest

import doctor
import evaluate
import export
import train
import visualize
from benchmarks import results_page
from model import features
from shard_tools import make_shards
from training import compare, config

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
OTHERS = {"docker", "sbatch", "sky", "kubectl", "pip", "apt-get", "source"}  # programs that are not ours


def commands() -> list[str]:
    """All of the lines in code blocks, without comments, continued ones joined, each once."""
    found = []
    for page in PAGES:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S):
            if language in ("", "sh", "bash"):
                found += [line for line in block.replace("\\\n", " ").splitlines() if re.match(r"[a-z./]+ ", line)]
    return list(dict.fromkeys(found))


class ReadError(BaseException):
    """Raised as soon as a program has read its arguments: it must not begin to work."""


@pytest.fixture
def only_read(monkeypatch):
    """Programs read their arguments, and end."""

    def reading(original):
        def read(*arguments, **options):
            original(*arguments, **options)
            raise ReadError

        return read

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", reading(argparse.ArgumentParser.parse_args))
    monkeypatch.setattr(jsonargparse.ArgumentParser, "parse_args", reading(jsonargparse.ArgumentParser.parse_args))


@pytest.mark.parametrize("command", commands())
def test_every_command_is_understood(command: str, only_read, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    words = shlex.split(command, comments=True)
    words = words[: words.index(">")] if ">" in words else words
    if words[0] == "make":
        targets = [word for word in words[1:] if "=" not in word]
        assert all(re.search(rf"^{target}:", Path("Makefile").read_text(), re.M) for target in targets)
        return
    assert words[0] in OTHERS | {"python", "torchrun"}, "a program that this test does not know"
    if words[0] in OTHERS:
        assert all((ROOT / word).exists() for word in words if word.startswith(("launch/", "configs/")))
        return
    if words[1] == "-m":
        name, arguments, run = words[2], words[3:], runpy.run_module
    else:
        script = next(i for i, word in enumerate(words) if word.endswith(".py"))
        name, arguments, run = words[script], words[script + 1 :], runpy.run_path
    if name in ("venv", "benchmarks/results_page.py"):
        return
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    monkeypatch.syspath_prepend(str(Path(name).parent))
    with pytest.raises((ReadError, SystemExit)) as ended:
        run(name, run_name="__main__")
    assert getattr(ended.value, "code", 0) == 0, "it is refused"
    if name == "doctor.py":  # which reads what is meant for train.py only when it needs it
        settings = [word for word in arguments if "=" in word]
        monkeypatch.undo()
        config.parse(["data.shards=s", *settings])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


def test_every_page_is_named_in_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(readme.splitlines()) <= 120
    assert all(f"docs/{page.name}" in readme for page in (ROOT / "docs").glob("*.md"))


def test_the_tables_are_what_the_results_say() -> None:
    text = results_page.PAGE.read_text(encoding="utf-8")
    assert results_page.regenerate(text) == text
    assert all("| --- |" in found[0] for found in results_page.TABLE.finditer(text))
    assert not re.search(r"\| --- \|\n<!-- end", text), "a table without a row"


def test_every_figure_of_a_run_is_explained() -> None:
    text = (ROOT / "docs/training.md").read_text(encoding="utf-8")
    from pipeline.loader import COUNTERS

    names = {
        "step",
        "lr",
        "loss",
        "grad_norm",
        "data_wait_fraction",
        "evaluation/knn_top1",
        "evaluation/rankme",
        "ranks",
    }
    for name in {*names, *(f"pipeline/{counter}" for counter in COUNTERS)}:
        assert f"`{name}`" in text, name


def test_the_first_hour(synthetic_videos: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    """The script's own commands, noted by a stand-in for Python, then run here one by one, with small numbers."""
    monkeypatch.setattr("kernels.launch.triton_on_cpu", False)  # as outside of tests
    noted, code = tmp_path / "commands", tmp_path / "code.py"
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$#" "$@" >> {noted}\n[ "$1" = - ] && cat > {code} || true\n')
    python.chmod(0o755)
    small = {"PYTHON": str(python), "STEPS": "2", "IMAGE": "32", "FRAMES": "4", "BATCH": "4", "PATH": "/usr/bin:/bin"}
    out = tmp_path / "out"
    subprocess.run(["bash", str(ROOT / "docs/first_hour.sh"), str(synthetic_videos), str(out)], env=small, check=True)
    programs = {
        "shard_tools/make_shards.py": make_shards.main,
        "doctor.py": lambda arguments: doctor.main([*arguments, "--seconds", "0.05"]),
        "train.py": lambda arguments: train.train(config.parse([*arguments, "data.num_threads=1", "device=cpu"])),
        "training.compare": compare.main,
        "visualize.py": visualize.main,
        "evaluate.py": lambda arguments: evaluate.evaluate(evaluate.parse_arguments(arguments)),
        "model.features": features.main,
        "export.py": export.main,
    }
    words = iter(noted.read_text().splitlines())
    for count in words:
        command = [next(words) for _ in range(int(count))]
        if command[0] == "-":
            monkeypatch.setattr(sys, "argv", command)
            exec(compile(code.read_text(), "first_hour", "exec"), {})
        else:
            name, *arguments = command[1:] if command[0] == "-m" else command
            assert not programs[name](arguments), command
    assert (out / "pretrain/report.html").is_file()
    assert len(list((out / "figures").glob("*.png"))) == 2
    assert (out / "finetune/evaluation/results.json").is_file()
    assert (out / "features/features-00000.safetensors").is_file()
    assert "image_size: 48\n" in (out / "larger/config.yaml").read_text()
    assert f"weights of {out}/huggingface: tokenizer, encoder's blocks" in capsys.readouterr().err
    assert (out / "larger_features/features-00000.safetensors").is_file()

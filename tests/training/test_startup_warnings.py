"""Warnings before a run begins."""

import json
import tracemalloc
from pathlib import Path

import pytest
import torch
from made_videos import encode, make_hashes, write_shards

from adamae.common.errors import InputError
from adamae.export import convert
from adamae.model.weights.pretrained import Weights
from adamae.pipeline.shards import index as index_module
from adamae.pipeline.shards.dataset import ShardDataset
from adamae.training import startup_warnings as warnings_module
from adamae.training.config import parse
from adamae.training.startup_warnings import (
    count_shared_videos,
    startup_warnings,
    warn_of_flips,
    warn_of_scale,
)

CPU = torch.device("cpu")
LONG = ("model.num_frames=8", "data.frame_stride=2")
SHORT = ("model.num_frames=2", "data.frame_stride=1")

RECIPES = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """Write shards of four videos with 3, 6, 20 and 30 frames, 8 per second."""
    videos = [(f"v{length}", encode(length)) for length in (3, 6, 20, 30)]
    return write_shards(tmp_path / "shards", videos, classes=2)


def warn(shards: Path, *overrides: str) -> list[str]:
    """Return the warnings of a run on shards."""
    config = parse([f"data.shards={shards}", "model.size=tiny", *overrides])
    return startup_warnings(config, ShardDataset.open(shards), CPU)


def test_videos_shorter_than_a_clip_are_counted(shards: Path) -> None:
    (warning,) = warn(shards, *LONG)
    assert warning.startswith(
        "WARNING: 2 of 4 videos are shorter than a clip (the shortest has 3 of 15 frames)"
    )
    (warning,) = warn(shards, *LONG, "data.sampling=segments")
    assert "of 8 frames): frames are repeated" in warning
    assert warn(shards, *LONG, "model.num_frames=2") == []


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_what_cannot_be_exported_is_said_in_the_recipe_and_before_the_run(
    recipe: Path, shards: Path
) -> None:
    config = parse(["--config", str(recipe), f"data.shards={shards}"])
    weights = Weights({}, config.model, classes=[])
    try:
        convert(weights, "huggingface")
    except InputError:
        can_be_exported = False
    else:
        can_be_exported = True
    warnings = startup_warnings(config, ShardDataset.open(shards), CPU)
    assert any("exported with --to encoder only" in line for line in warnings) != can_be_exported
    assert ("# export    --to encoder only" in recipe.read_text()) != can_be_exported


@pytest.mark.parametrize(
    ("lengths", "stored_stride", "frame_stride", "advice"),
    [
        ((30, 30, 60), 1, 8, "set data.frame_stride=4 or lower model.num_frames"),
        ((30, 30, 60), 2, 16, "set data.frame_stride=8 or lower"),
        # A stride of 6 would fit, but is no multiple of the stored one.
        ((13, 14, 60), 4, 8, "set data.frame_stride=4 or lower"),
        ((7, 14, 60), 4, 4, "their last frame is repeated; lower model.num_frames"),
        # One short video of 31 does not decide about the stride.
        ((3, *[60] * 30), 1, 8, "their last frame is repeated; lower model.num_frames"),
    ],
)
def test_a_stride_is_advised_that_works(
    tmp_path: Path, lengths: tuple[int, ...], stored_stride: int, frame_stride: int, advice: str
) -> None:
    videos = [(f"v{number}", encode(length)) for number, length in enumerate(lengths)]
    shards = write_shards(tmp_path / "shards", videos, frame_stride=[stored_stride] * len(videos))
    (warning,) = warn(shards, "model.num_frames=8", f"data.frame_stride={frame_stride}")
    assert advice in warning


def test_videos_of_fewer_frames_a_second_are_counted(shards: Path) -> None:
    slow, short = warn(shards, "model.num_frames=8", "data.fps=12")
    assert slow.startswith(
        "WARNING: 4 of 4 videos have fewer than 12 frames per second (the slowest has 8)"
    )
    assert short.startswith(
        "WARNING: 1 of 4 videos are shorter than a clip (the shortest has 3 of 6 frames)"
    )
    # A rate so near to the videos' repeats no frame.
    (short,) = warn(shards, "model.num_frames=8", "data.fps=8.05")
    assert short.endswith("raise data.fps or lower model.num_frames")
    assert "3 of 15 frames" in warn(shards, "model.num_frames=8", "data.fps=4")[0]


def test_validation_on_what_is_learnt_from_is_counted(shards: Path, tmp_path: Path) -> None:
    warning = warn(shards, *SHORT, "task=finetune", f"evaluation.shards={shards}")[0]
    assert warning.startswith("WARNING: 4 of 4 videos of evaluation.shards are also trained on")
    dataset = ShardDataset.open(shards)
    same = dataset.read_video([sample.key for sample in dataset.samples].index("v20"))
    other = write_shards(tmp_path / "other", [("w", same), ("x", encode(20, first=7))], classes=2)
    # One video of the others has the same bytes under another name.
    assert "1 of 2 videos" in warn(shards, *SHORT, f"evaluation.shards={other}")[0]


def test_counting_shared_videos_takes_the_memory_of_some_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_module, "BLOCK_ROWS", 2**10)
    # Sources are in a table that these datasets lack.
    monkeypatch.setattr(warnings_module, "MAX_SOURCES", 0)
    training = make_hashes(200_000)
    held_out = make_hashes(1000)
    hashes = held_out.parts[0].rows["sha256"]
    # A hundred differ, but not in the first eight bytes.
    hashes[:100] = [bytes(digest)[:8] + bytes(24) for digest in hashes[:100]]
    tracemalloc.start()
    num_shared = count_shared_videos(held_out, training)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert num_shared == 900
    # The hashes alone are 6.4 MB.
    assert peak < 1e6


@pytest.mark.parametrize(
    ("overrides", "num_videos", "device", "sentences"),
    [
        ("model.size=tiny", 50, "cpu", []),
        ("model.size=small", 3_000, "cuda", []),
        ("model.size=small task=finetune", 50, "cuda", []),
        (
            "model.size=small",
            3_000,
            "cpu",
            ["may take weeks without a GPU: on a CPU, start with --config"],
        ),
        (
            "model.size=small",
            2_999,
            "cuda",
            ["few for pre-training at size small, which needs about 3,000: continue"],
        ),
        (
            "model.size=huge",
            9_000,
            "cuda",
            ["size huge, which needs about 50,000: continue from published weights:"],
        ),
        ("init_from=w", 300, "cuda", []),
        ("init_from=w", 49, "cuda", ["at size base, which needs about 300: extract features with"]),
    ],
)
def test_a_machine_or_a_dataset_too_small_for_the_model_is_said(
    overrides: str, num_videos: int, device: str, sentences: list[str]
) -> None:
    config = parse(["data.shards=s", *overrides.split()])
    warnings = warn_of_scale(config, num_videos, torch.device(device))
    assert len(warnings) == len(sentences)
    for sentence, warning in zip(sentences, warnings, strict=True):
        assert sentence in warning


def test_classes_without_a_video_to_learn_from_are_named(shards: Path, tmp_path: Path) -> None:
    few = write_shards(tmp_path / "few", [("x", encode(20, first=7))], classes=2)
    (warning,) = warn(few, *SHORT, "task=finetune", f"evaluation.shards={shards}")
    assert "has 1 class ('class 1') without a video to learn from" in warning
    assert warn(few, *SHORT, f"evaluation.shards={shards}") == []


@pytest.mark.parametrize("name", ["swipe_left", "SwipeLeft", "turn right", "LEFT-HAND"])
def test_classes_that_a_flip_confuses_are_said(name: str) -> None:
    (warning,) = warn_of_flips(["bright", name])
    assert warning.startswith(f"WARNING: classes tell left from right ({name!r})")
    assert warn_of_flips(["bright light", "cleft", "upright", "forward"]) == []


def test_only_classifiers_that_flip_clips_are_warned(tmp_path: Path) -> None:
    shards = write_shards(tmp_path / "shards", [("v", encode(20))], classes=2)
    info = json.loads((shards / "dataset.json").read_text())
    info["classes"] = ["left", "right"]
    (shards / "dataset.json").write_text(json.dumps(info))
    assert "are mirrored" in warn(shards, *SHORT, "task=finetune")[0]
    assert warn(shards, *SHORT, "task=finetune", "data.flip=false") == []
    assert warn(shards, *SHORT) == []

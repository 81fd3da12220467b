"""The registry of targets."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import evaluate
import export
import preview
import train
import visualize
from common.atomic_io import write_text
from fuzzer import judges
from fuzzer.cases import Place, Step, Target, ops
from fuzzer.edits import folders, plain, tars, tensors, values, videos
from fuzzer.loading import load
from fuzzer.materials import TINY
from fuzzer.planted import PLANTED
from shard_tools import check_shards, make_shards, workers
from training.config import parse, to_yaml

workers.START_METHOD = "fork"  # to spawn a worker, with its imports, takes longer than a case

MAKING = ("--workers", "1", "--timeout", "6", "--max-rejects", "1", "--samples-per-shard", "3")
COPY = ("--encode", "copy")
COPY_CHECKED = (*COPY, "--check", "full")  # check_shards finds what a sample of the frames may miss
REENCODE = ("--preset", "ultrafast", "--frame-stride", "2", "--gop", "4")


def making(source: str, *options: str, stride: int = 1, root: str | None = None) -> Callable[[Place], list[Step]]:
    """Make shards of what is given, check them, load them."""

    def steps(place: Place) -> list[Step]:
        where = [str(place.given / source), str(place.out), *MAKING, *options]
        where += ["--root", str(place.given / root)] if root else []
        return [
            Step("make_shards", lambda: make_shards.main(where), refuses=(2, 3), goes_on=True),
            Step("check_shards", lambda: check_shards.main([str(place.out), "--workers", "1"]), refuses=(1, 2)),
            Step("load", lambda: load(place.out, place.out, stride)),
        ]

    return steps


def two_videos(root: Path, rng: Random) -> None:
    """Two of the material's videos are enough; now and then one of them is odd from the start."""
    paths = sorted(path for path in root.rglob("*") if path.is_file())
    odd = [path for path in paths if path.parent.name == "odd"]
    kept = {rng.choice(paths), rng.choice(odd if rng.random() < 0.1 else paths)}
    for path in paths:
        if path not in kept:
            path.unlink()


def one_video(root: Path, rng: Random) -> None:
    kept = rng.choice(sorted(path for path in root.rglob("*") if path.is_file()))
    kept.rename(root / f"video{kept.suffix}")
    for folder in [path for path in root.iterdir() if path.is_dir()]:
        shutil.rmtree(folder)


def one_list(root: Path, rng: Random) -> None:
    """The list goes on under a name that says its kind."""
    lists = sorted(path for path in root.iterdir() if path.is_file())
    kept = rng.choice(lists)
    for path in lists:
        if path != kept:
            path.unlink()


def making_of_list(place: Place) -> list[Step]:
    found = sorted(path.name for path in place.given.iterdir() if path.is_file())
    return making(found[0] if found else "list.csv", *COPY, root="videos")(place)[:2]


def checking(place: Place) -> list[Step]:
    arguments = [str(place.given / "shards"), "--workers", "1"]
    return [Step("check_shards", lambda: check_shards.main(arguments), refuses=(1, 2))]


def loading(place: Place) -> list[Step]:
    return [Step("load", lambda: load(place.given / "shards", place.out, 4))]


def adding(place: Place) -> list[Step]:
    options = ("--workers", "1", "--max-rejects", "1", "--samples-per-shard", "3", "--preset", "ultrafast")
    arguments = [str(place.given / "videos"), str(place.given / "shards"), *options]
    return [Step("make_shards", lambda: make_shards.main(arguments), refuses=(2, 3), goes_on=True)]


def previewing(place: Place) -> list[Step]:
    def main() -> None:
        sizes = ["--num-clips", "2", "--num-frames", "4", "--image-size", "16"]
        data = ["--data.decoder", "pyav", "--data.num_threads", "1", "--data.decode_timeout_s", "5"]
        sys.argv = ["preview", str(place.given / "shards"), "--output", str(place.out), *sizes, *data]
        preview.main()

    return [Step("preview", main)]


def importing(name: str) -> Callable[[Place], list[Step]]:
    def steps(place: Place) -> list[Step]:
        made = str(place.out / "imported.safetensors")
        arguments = ["import", str(place.given / name), made, "--num-frames", "4"]
        others = [["export", made, str(place.out / to), "--to", to] for to in ("encoder", "huggingface")]
        return [
            Step("import", lambda: export.main(arguments)),
            *(Step(f"export-{other[-1]}", lambda other=other: export.main(other)) for other in others),
        ]

    return steps


def showing(model: str, video: str, *options: str) -> Callable[[Place], list[Step]]:
    """Draw the figures of a video under a model; both are paths from the place's folder."""

    def steps(place: Place) -> list[Step]:
        found = sorted(place.folder.glob(video)) or [place.folder / video]
        arguments = [str((place.folder / model).resolve()), str(found[0]), "--output", str(place.out), *options]
        return [Step("visualize", lambda: visualize.main(arguments))]

    return steps


def showing_video(place: Place) -> list[Step]:
    model = place.material.parents[1] / "weights" / "material" / "model.safetensors"
    return showing(str(model), "given/video.*", "--frame-stride", "2")(place)


def judging(place: Place) -> list[Step]:
    places = [str(place.given / "run"), str(place.material / "shards"), "--output", str(place.out)]
    return [Step("evaluate", lambda: evaluate.evaluate(evaluate.parse_arguments(places)))]


def resuming(*options: str) -> Callable[[Place], list[Step]]:
    def steps(place: Place) -> list[Step]:
        places = [f"data.shards={place.material / 'shards'}", f"run={place.given / 'run'}"]
        return [Step("train", lambda: train.train(parse([*TINY, *options, *places])), goes_on=True)]

    return steps


def parsing(place: Place) -> list[Step]:
    def main() -> None:
        write_text(place.out / "parsed.yaml", to_yaml(parse(["--config", str(place.given / "config.yaml")])))

    return [Step("parse", main)]


SHARDS = (
    *ops("shards/*.json", values.JSON),
    *ops("shards/*.jsonl", values.LINES),
    *ops("shards/*.idx", (*values.LINES, *plain.EDITS)),
    *ops("shards/*.npy", (*tensors.ARRAYS, *plain.EDITS)),
    *ops("shards/*.tar", (*tars.EDITS, *plain.EDITS)),
    *ops("shards/*", plain.EDITS),
)
RUN = (
    *ops("run/*.jsonl", values.LINES),
    *ops("run/checkpoints/*/*.json", values.JSON),
    *ops("run/config.yaml", values.YAML),
    *ops("run/checkpoints/*/*.safetensors", tensors.SAFETENSORS),
    *ops("run/checkpoints/*/*.pt", tensors.PYTORCH),
    *ops("run/**/*", plain.EDITS[:4]),
)
IN_RUN = tuple(
    op._replace(edit=lambda root, rng, edit=op.edit: edit(root / "run", rng)) for op in ops("", folders.EDITS)
)
IN_SHARDS = tuple(
    op._replace(edit=lambda root, rng, edit=op.edit: edit(root / "shards", rng)) for op in ops("", folders.EDITS)
)
VIDEOS = ops("**/*", (*videos.EDITS, *plain.EDITS, videos.playlist))

TARGETS = {
    target.name: target
    for target in (
        Target(
            "videos-copied", "videos", VIDEOS, making("", *COPY_CHECKED), judges.made_of_folder, two_videos, weight=3,
        ),
        Target("videos-encoded", "videos", VIDEOS, making("", *REENCODE, stride=2), judges.made_of_folder, two_videos),
        Target("videos-shown", "videos", VIDEOS, showing_video, judges.shown, one_video),
        Target(
            "tars", "tar", ops("*.tar", (*tars.EDITS, *tars.EDITS, *plain.EDITS)), making("videos.tar", *COPY_CHECKED),
            judges.made_of_tar, weight=2,
        ),
        Target(
            "lists", "lists",
            (*ops("*.json", values.JSON), *ops("*.[ct]*", (*values.LINES, *plain.EDITS))),
            making_of_list, judges.made_of_list, one_list,
        ),
        Target("shards-checked", "dataset", (*SHARDS, *IN_SHARDS), checking, judges.check_finds, weight=2),
        Target("shards-loaded", "dataset", (*SHARDS, *IN_SHARDS), loading, judges.loaded, weight=2),
        Target("shards-previewed", "dataset", (*SHARDS, *IN_SHARDS), previewing, judges.shown),
        Target("shards-added-to", "dataset", (*SHARDS, *IN_SHARDS), adding, judges.added, changes_given=True),
        Target(
            "safetensors", "weights", ops("model.safetensors", (*tensors.SAFETENSORS, *plain.EDITS)),
            importing("model.safetensors"), judges.imported,
        ),
        Target(
            "pytorch", "weights", ops("model.pt", (*tensors.PYTORCH, *plain.EDITS)), importing("model.pt"),
            judges.imported,
        ),
        Target(
            "weights-shown", "weights", ops("model.safetensors", tensors.SAFETENSORS),
            showing("given/model.safetensors", "given/video.mp4", "--frame-stride", "2"), judges.shown,
        ),
        Target("run-resumed", "run", (*RUN, *IN_RUN), resuming(), judges.resumed, changes_given=True, weight=2),
        Target(
            "run-shown", "run", (*RUN, *IN_RUN),
            showing("given/run", "given/videos/class 0/v0.mp4", "--checkpoints", "--html"), judges.shown,
        ),
        Target("classifier-judged", "classifier", (*RUN, *IN_RUN), judging, judges.evaluated),
        Target("configuration", "config", ops("config.yaml", (*values.YAML, *plain.EDITS)), parsing, judges.parsed),
        *PLANTED,
    )
}  # fmt: skip
NEEDS = {"videos-shown": ("weights",)}  # materials besides a target's own

"""What must be true of what a command has made, worked out by other means than the command's."""

import io
import json
import posixpath
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import av
import av.logging
import numpy as np
import yaml
from PIL import Image
from safetensors import SafetensorError
from safetensors.numpy import load_file
from shard_making import all_samples, video_bytes

from fuzzer.cases import Ended, Place
from pipeline.shards.format import DATASET_FILE, Sample
from shard_tools.build import read_rejects
from shard_tools.encoding.source import VIDEO_EXTENSIONS

MOST_GREY = 4  # grey levels between the means of two images: those of neighbouring frames are 10 apart
MOST_ERROR = 14  # mean grey levels between two ways of scaling
MOST_CLIPPED = 0.3  # of a frame's values; of an intact one a hundredth
NUMBERED = "sample-"  # what the loader calls a video whose name has changed


# Shards that were made


def made_of_folder(place: Place, steps: list[Ended]) -> Iterator[str]:
    """Every video given is in a shard or rejected, those that nobody touched are in a shard, copies are exact."""
    given = {str(path.relative_to(place.given)): path for path in place.given.rglob("*") if is_video(path.name)}
    yield from made(place, steps, set(given))
    stored = _stored(place.out)
    original = {name: place.material / name for name in given if not name.startswith("odd/")}
    intact = {name for name, path in original.items() if given[name].read_bytes() == path.read_bytes()}
    if lost := sorted(intact - {sample.source for _, sample in stored}):
        yield f"videos that are in order are not in a shard: {', '.join(lost)} ({_said(steps[0])})"
    for shard, sample in stored:
        if sample.source in given and sample.label is not None:
            yield from _same_bytes(place, shard, sample, given[sample.source].read_bytes())


def made_of_tar(place: Place, steps: list[Ended]) -> Iterator[str]:
    """Every member that calls itself a video is in a shard or rejected; copies are exact."""
    members: dict[str, bytes] = {}
    try:
        with tarfile.open(place.given / "videos.tar", "r:") as tar:
            for member in tar:
                opened = tar.extractfile(member) if member.isreg() else None
                content = opened.read() if opened and member.size < 2**24 else b""
                if is_video(member.name) and not member.isdir():
                    members[posixpath.normpath(f"videos.tar/{member.name}")] = content
    except (tarfile.TarError, OSError, ValueError, OverflowError, RecursionError):
        return  # Python's own reader cannot say what is in it
    yield from made(place, steps, set(members), renamed=True)
    for shard, sample in _stored(place.out):
        yield from _same_bytes(place, shard, sample, members.get(posixpath.normpath(sample.source), b""))


def made_of_list(place: Place, steps: list[Ended]) -> Iterator[str]:
    """What is stored is the file that its name says."""
    yield from made(place, steps, None)
    for shard, sample in _stored(place.out):
        path = place.given / "videos" / sample.source
        yield from _same_bytes(place, shard, sample, path.read_bytes() if path.is_file() else b"")


def made(place: Place, steps: list[Ended], sources: set[str] | None, renamed: bool = False) -> Iterator[str]:
    """What holds for all shards: nothing is lost, and the check and the loader find them good."""
    stored = {sample.source for _, sample in _stored(place.out)}
    rejected = set(read_rejects(place.out))
    if steps[0].code in (0, 3) and not stored:
        yield "make_shards ends well without a dataset"
    if both := stored & rejected:
        yield f"stored and rejected at once: {', '.join(sorted(both))}"
    known = {posixpath.normpath(name) for name in stored | rejected} if renamed else stored | rejected
    if sources is not None and (steps[0].code != 2 or rejected):
        if lost := sources - known:
            yield f"neither in a shard nor rejected: {', '.join(map(repr, sorted(lost)))} ({_said(steps[0])})"
        if strange := known - sources:
            yield f"in a shard or rejected, and never given: {', '.join(map(repr, sorted(strange)))}"
    for step in steps[1:]:
        if step.code:
            yield f"{step.name} refuses what make_shards has just made: {_said(step)}"
    if (place.out / "clips.npz").exists():
        videos = {sample.key: video_bytes(place.out, shard, sample) for shard, sample in _stored(place.out)}
        yield from delivered(place.out, videos)


def is_video(name: str) -> bool:
    base = posixpath.basename(name)
    return base.rpartition(".")[2].lower() in VIDEO_EXTENSIONS and not base.startswith(".")


def _stored(folder: Path) -> list[tuple[str, Sample]]:
    return all_samples(folder) if (folder / DATASET_FILE).exists() else []


def _same_bytes(place: Place, shard: str, sample: Sample, content: bytes) -> Iterator[str]:
    if sample.codec and _is_copy(place.out) and video_bytes(place.out, shard, sample) != content:
        yield f"{sample.source}: the bytes in the shard are not those of the input"


def _is_copy(folder: Path) -> bool:
    return json.loads((folder / DATASET_FILE).read_text())["encode"].get("encode") == "copy"


# Clips that were delivered


def delivered(folder: Path, videos: dict[str, bytes], labels: dict[str, int] | None = None) -> Iterator[str]:
    """The clips in clips.npz show the frames that the plan names, as a plain decode from the start gives them."""
    with np.load(folder / "clips.npz") as found:
        rows = list(zip(*(found[name] for name in ("clips", "keys", "labels", "frames", "boxes")), strict=True))
    decoded: dict[str, list[np.ndarray] | None] = {}
    for clip, key, label, numbers, box in rows:
        if key.startswith(NUMBERED):  # names that have changed are not used
            continue
        if key not in videos:
            yield f"the loader delivers {key!r}, which nobody has made"
            continue
        if labels is not None and label != labels[key]:
            yield f"the loader delivers {key} with label {label} instead of {labels[key]}"
        if key not in decoded:
            decoded[key] = _decoded(videos[key])
        frames = decoded[key]
        if frames is None:
            continue
        if max(numbers) >= len(frames):
            yield f"the loader delivers frame {max(numbers)} of {key}, which has {len(frames)}"
            continue
        for image, number in zip(clip, numbers, strict=True):
            if _clipped(frames[number]) > MOST_CLIPPED:
                continue  # noise of colours that no screen has, clipped here before it is scaled, and there after that
            wanted = _cut(frames[number], box, image.shape[0])
            error, shift = np.abs(image - wanted).mean(), abs(image.mean() - wanted.mean())
            if error > MOST_ERROR or shift > MOST_GREY:
                yield f"frame {number} of {key} is delivered {error:.0f} grey levels off a plain decode"
                break


def _decoded(video: bytes) -> list[np.ndarray] | None:
    """All frames in the order of their times, if each has one of its own, upright and as BT.601, float [H, W, 3]; None
    where a strict decoder refuses one, or what it is, or complains (FFV1's conceals what it was told to refuse)."""
    frames, times = [], []
    av.logging.set_level(av.logging.ERROR)
    try:
        with av.logging.Capture() as complaints, av.open(io.BytesIO(video)) as container:
            stream = container.streams.video[0]
            stream.codec_context.thread_count = 1
            stream.codec_context.options = {"err_detect": "explode+crccheck+bitstream+buffer"}
            for frame in container.decode(stream):
                if frame.is_corrupt or frame.rotation % 90:  # what is upright then is a question of taste
                    return None
                image = frame.to_ndarray(format="rgb24", src_colorspace="ITU601", dst_colorspace="ITU601")
                frames.append(np.rot90(image, frame.rotation % 360 // 90).astype(float))
                times.append(frame.pts)
    except (av.error.FFmpegError, ValueError, IndexError):
        return None
    finally:
        av.logging.set_level(None)
    if complaints:
        return None
    if None in times or len(set(times)) < len(times):
        return frames
    return [frames[place] for place in sorted(range(len(frames)), key=times.__getitem__)]


def _clipped(frame: np.ndarray) -> float:
    return float(((frame <= 0) | (frame >= 255)).mean())


def _cut(frame: np.ndarray, box: np.ndarray, size: int) -> np.ndarray:
    """The crop out of a frame, scaled; `box`: x, y, width, height, flipped, and the stored width and height."""
    x, y, width, height, flipped, stored_width, stored_height = map(int, box)
    across, down = frame.shape[1] / stored_width, frame.shape[0] / stored_height
    left, top = round(x * across), round(y * down)
    crop = frame[top : top + max(1, round(height * down)), left : left + max(1, round(width * across))]
    crop = crop[:, ::-1] if flipped else crop
    return np.asarray(Image.fromarray(crop.round().astype(np.uint8)).resize((size, size), Image.BILINEAR), float)


# Datasets that were damaged


def check_finds(place: Place, steps: list[Ended]) -> Iterator[str]:
    """check_shards says that all is well where it is, and not where it is not."""
    changed = sorted(_changed(place.material / "shards", place.given / "shards", _meaning))
    if steps[0].code == 0 and changed:
        yield f"check_shards overlooks that {', '.join(changed)} is not what was made"
    # Other bytes of the same meaning are seen by their hash, or not at all.
    if steps[0].code and not list(_changed(place.material / "shards", place.given / "shards", Path.read_bytes)):
        yield f"check_shards raises a false alarm: {_said(steps[0])}"


def _changed(before: Path, after: Path, meaning: Callable[[Path], Any]) -> Iterator[str]:
    """Names of the files of a dataset that say something else than they did; what else lies there is no part of it."""
    for path in sorted(before.iterdir()):
        other = after / path.name
        if path.name.startswith(".") or path.name == "rejected.jsonl":
            continue
        if not other.is_file() or meaning(path) != meaning(other):
            yield path.name


def _meaning(path: Path) -> Any:
    data = path.read_bytes()
    try:  # of text in UTF-8: from bytes, json would guess another encoding
        if path.name == DATASET_FILE:
            return json.loads(data.decode())
        if path.suffix == ".jsonl":
            return [json.loads(line.decode()) for line in data.splitlines()]
    except (ValueError, AttributeError, RecursionError):
        return data
    return data


def loaded(place: Place, steps: list[Ended]) -> Iterator[str]:
    """What the loader delivers from damaged shards are the videos that were put there, with their labels."""
    if steps[0].code:
        return
    samples = all_samples(place.material / "shards")
    videos = {sample.key: video_bytes(place.material / "shards", shard, sample) for shard, sample in samples}
    yield from delivered(place.out, videos, {sample.key: sample.label for _, sample in samples})


def added(place: Place, steps: list[Ended]) -> Iterator[str]:
    """A dataset that was gone on with holds all videos, or says which not."""
    if steps[0].code in (0, 3):
        videos, shards = place.given / "videos", place.given / "shards"
        known = {sample.source for _, sample in _stored(shards)} | set(read_rejects(shards))
        if lost := {str(path.relative_to(videos)) for path in videos.rglob("*.mp4")} - known:
            yield f"neither in a shard nor rejected: {', '.join(sorted(lost))}"


# Weights, runs and configurations


def imported(place: Place, steps: list[Ended]) -> Iterator[str]:
    """What was imported are the numbers of the file, all of them finite."""
    made = place.out / "imported.safetensors"
    if steps[0].code:
        if made.exists():
            yield "export refuses the file and writes one all the same"
        return
    ours = load_file(made)
    if wild := sorted(name for name, value in ours.items() if not np.isfinite(value).all()):
        yield f"weights that are not finite are imported: {', '.join(wild)}"
    given = place.given / "model.safetensors"
    try:
        theirs = load_file(given) if given.is_file() else {}
    except (SafetensorError, OSError, TypeError, ValueError, KeyError):
        return
    for name, value in ours.items():
        if name in theirs and not np.array_equal(value, theirs[name], equal_nan=True):
            yield f"{name} is imported with other numbers"


def evaluated(place: Place, steps: list[Ended]) -> Iterator[str]:
    """All videos were judged, by figures that are numbers."""
    if steps[0].code:
        return
    results = json.loads((place.out / "results.json").read_text())
    count = sum(1 for _ in all_samples(place.material / "shards"))
    if results["num_videos"] != count or not np.isfinite([results["top1"], results["nll"]]).all():
        figures = f"top-1 {results['top1']}, nll {results['nll']}"
        yield f"evaluate judges {results['num_videos']} of {count} videos, {figures}"


def resumed(place: Place, steps: list[Ended]) -> Iterator[str]:
    """A run that went on to its end has ended with the weights of one that was left in peace."""
    if steps[0].code:
        return
    name = "checkpoints/step-00000003/model.safetensors"
    ours, reference = (load_file(run / name) for run in (place.given / "run", place.material.with_name("reference")))
    if different := sorted(key for key in reference if not np.array_equal(ours.get(key), reference[key])):
        yield f"the run has ended with other weights than one that was not damaged: {', '.join(different)}"
    lines = (place.given / "run/metrics.jsonl").read_text(errors="replace").splitlines()
    if not lines or _step(lines[-1]) != 3:
        yield f"metrics.jsonl does not end with the last step: {lines[-1:]}"


def _step(line: str) -> Any:
    try:
        return json.loads(line)["step"]
    except (ValueError, KeyError, TypeError):
        return None


def shown(place: Place, steps: list[Ended]) -> Iterator[str]:
    """There are figures, which are pictures."""
    if steps[0].code:
        return
    pictures = sorted(place.out.glob("*.png"))
    if not pictures:
        yield f"there is no figure ({_said(steps[0])})"
    for path in pictures:
        with Image.open(path) as picture:
            picture.load()


def parsed(place: Place, steps: list[Ended]) -> Iterator[str]:
    """The configuration says what the file says, as far as that is a number or a text."""
    if steps[0].code:
        return
    asked = yaml.safe_load((place.given / "config.yaml").read_bytes())
    given = yaml.safe_load((place.out / "parsed.yaml").read_text())
    for name, value in _flat(asked):
        found = dict(_flat(given)).get(name)
        if isinstance(value, int | float) and not isinstance(value, bool) and found != value:
            yield f"{name} is {value!r} in the file and {found!r} in the configuration"


def _flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, dict) else ():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _said(step: Ended) -> str:
    lines = [line for line in (step.stderr + step.stdout).replace("\r", "\n").split("\n") if line.strip()]
    lines = [line for line in lines if "%|" not in line]  # progress
    return f"exit code {step.code}: {' | '.join(lines[-3:])[:500]}"

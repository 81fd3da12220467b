"""What is edited: small videos of many kinds, tars, lists, shards, runs and weights, made once by the code itself."""

import io
import json
import os
import shutil
import tarfile
import traceback
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from made_videos import KINDS, encode
from PIL import Image

import export
import train
from shard_tools import make_shards
from training.config import parse

NUM_FRAMES = 12
TINY = [
    "model.num_frames=4", "model.image_size=16", "model.patch_size=8", "model.mask_ratio=0.5", "model.size=tiny",
    "model.encoder_width=32", "model.encoder_depth=1", "model.encoder_heads=4", "model.decoder_width=32",
    "model.decoder_depth=1", "model.decoder_heads=4", "data.frame_stride=4", "data.decoder=pyav", "batch_size=2",
    "steps=3", "precision=fp32", "optimizer.warmup_epochs=0", "device=cpu", "log_every=1", "data.num_threads=1",
    "data.prefetch=1", "evaluation.every=null", "checkpoint_every=1", "data.decode_timeout_s=8",
]  # fmt: skip
CLASSIFIER = ["task=finetune", "finetune.mixup=0", "finetune.cutmix=0", "evaluation.every=3"]
FORMATS = ("yuv420p10le", "yuv422p", "yuv422p10le", "yuv444p", "gray", "yuvj420p", "nv12")


def draw_videos(folder: Path) -> None:
    """Two classes of videos that are all in order; the frame's number can be read from every frame."""
    content = {name.replace(" ", "-").replace(",", ""): kind for name, kind in KINDS.items()}
    content |= {f"ffv1-{name}": {"codec": "ffv1", "container": "matroska", "pix_fmt": name} for name in FORMATS[:3]}
    content |= {f"h264-{name}": {"pix_fmt": name, "options": {"preset": "ultrafast"}} for name in FORMATS}
    content["odd-sides"] = {"width": 66, "height": 34, "pix_fmt": "yuv444p", "options": {"preset": "ultrafast"}}
    content["ts"] = {"container": "mpegts", "options": {"preset": "ultrafast", "g": "4"}}
    extensions = {"matroska": "mkv", "mpegts": "ts"}
    for number, (name, kind) in enumerate(sorted(content.items())):
        container = str(kind.get("container", "mp4"))
        path = folder / "ab"[number % 2] / f"{name}.{extensions.get(container, container)}"
        path.parent.mkdir(exist_ok=True, parents=True)
        path.write_bytes(encode(NUM_FRAMES, first=number, pattern=True, **kind))  # type: ignore[arg-type]
    fragmented(next(folder.glob("*/h264-without-B-frames.mp4")), folder / "b" / "fragmented.mp4")
    draw_odd_ones(folder / "odd")


def fragmented(source: Path, target: Path) -> None:
    options = {"movflags": "frag_keyframe+empty_moov+default_base_moof"}
    with av.open(str(source)) as opened, av.open(str(target), "w", options=options) as output:
        stream = output.add_stream_from_template(opened.streams.video[0])
        for packet in opened.demux(opened.streams.video[0]):
            if packet.size:
                packet.stream = stream
                output.mux(packet)


def draw_odd_ones(folder: Path) -> None:
    """Files that may well be refused: a huge picture, a still, sound, nothing, text."""
    folder.mkdir()
    Image.new("RGB", (64, 48)).save(folder / "still.png")
    (folder / "still.png").rename(folder / "still.mp4")
    (folder / "nothing.mp4").write_bytes(b"")
    (folder / "text.mkv").write_text("no video\n")
    with av.open(str(folder / "huge.mov"), "w") as output:
        stream = output.add_stream("png", rate=Fraction(8))
        stream.width = stream.height = 9000
        stream.pix_fmt = "gray"
        output.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((9000, 9000), np.uint8), format="gray")))
        output.mux(stream.encode(None))
    with av.open(str(folder / "sound.mp4"), "w") as output:
        sound = output.add_stream("aac", rate=44100, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 4096), np.float32), format="fltp", layout="mono")
        frame.rate = 44100
        output.mux(sound.encode(frame))
        output.mux(sound.encode(None))


def draw_secret(folder: Path) -> None:
    """What no command is given, and so none may open."""
    (folder / "secret.mp4").write_bytes(encode(4, options={"preset": "ultrafast"}))


def plain_videos(folder: Path, count: int = 4) -> list[Path]:
    folder.mkdir(parents=True)
    paths = []
    for number in range(count):
        path = folder / f"v{number}.mp4"
        path.write_bytes(encode(NUM_FRAMES, first=number, pattern=True, options={"preset": "ultrafast", "g": "4"}))
        paths.append(path)
    return paths


def make_tar(folder: Path) -> None:
    """A WebDataset of videos with their labels beside them."""
    paths = plain_videos(folder / "videos")
    with tarfile.open(folder / "videos.tar", "w") as tar:
        for number, path in enumerate(paths):
            beside = (f"class {number % 2}".encode(), "cls") if number % 2 else (b'{"label": "class 0"}', "json")
            for content, extension in ((path.read_bytes(), "mp4"), beside):
                member = tarfile.TarInfo(f"{path.stem}.{extension}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    shutil.rmtree(folder / "videos")


def make_lists(folder: Path) -> None:
    """The same videos, listed in every way that is read."""
    names = [path.name for path in plain_videos(folder / "videos")]
    labels = ["walk", "run, fast", "walk", "jump"]
    pairs = list(zip(names, labels, strict=True))
    (folder / "list.txt").write_text("".join(f"{name} {label.split()[0]}\n" for name, label in pairs))
    (folder / "list.csv").write_text("path,label\n" + "".join(f'{name},"{label}"\n' for name, label in pairs))
    (folder / "list.tsv").write_text("".join(f"{name}\t{label}\n" for name, label in pairs))
    kinetics = "".join(f'"{label}",{name[:-4]},0,10,train\n' for name, label in pairs)
    (folder / "kinetics.csv").write_text("label,youtube_id,time_start,time_end,split\n" + kinetics)
    templates = [{"id": name[:-4], "template": f"Moving [{label}]"} for name, label in pairs]
    (folder / "templates.json").write_text(json.dumps(templates))
    (folder / "list.json").write_text(json.dumps([{"path": name, "label": label} for name, label in pairs]))


def make_dataset(folder: Path) -> None:
    """Shards of five labelled videos, and the videos, with one more that is not in the shards yet."""
    for number, path in enumerate(plain_videos(folder / "videos", 5)):
        kept = folder / "videos" / f"class {number % 2}" / path.name
        kept.parent.mkdir(exist_ok=True)
        path.rename(kept)
    (folder / "videos" / "class 0" / "text.mp4").write_text("no video")
    options = ["--workers", "1", "--max-rejects", "1", "--samples-per-shard", "3", "--preset", "ultrafast"]
    assert make_shards.main([str(folder / "videos"), str(folder / "shards"), *options]) == 0


def make_run(folder: Path) -> None:
    """Shards, and a run on them that ended in the middle; `reference/` is how it ends."""
    make_dataset(folder)
    arguments = [*TINY, f"data.shards={folder / 'shards'}", f"run={folder / 'run'}"]
    train.train(parse(arguments))
    reference = folder.with_name("reference")
    shutil.copytree(folder / "run", reference)
    shutil.rmtree(folder / "run" / "checkpoints" / "step-00000003")
    shutil.rmtree(folder / "run" / "tensorboard")


def make_classifier(folder: Path) -> None:
    make_dataset(folder)
    arguments = [f"data.shards={folder / 'shards'}", f"evaluation.shards={folder / 'shards'}"]
    train.train(parse([*TINY, *CLASSIFIER, *arguments, f"run={folder / 'run'}"]))
    shutil.rmtree(folder / "run" / "tensorboard")


def make_weights(folder: Path) -> None:
    """Weights as they are passed on: ours, and a file of PyTorch's in VideoMAE's layout; a video to look at."""
    made = folder.with_name("making-weights")
    make_run(made)
    shutil.copyfile(made / "run/checkpoints/step-00000002/model.safetensors", folder / "model.safetensors")
    export.main(["export", str(folder / "model.safetensors"), str(folder / "model.pt"), "--to", "adamae"])
    shutil.copyfile(made / "videos/class 0/v0.mp4", folder / "video.mp4")
    shutil.rmtree(made)
    shutil.rmtree(folder.with_name("reference"), ignore_errors=True)


def make_config(folder: Path) -> None:
    (folder / "config.yaml").write_text(
        "run: runs/x\nsteps: 3\nbatch_size: 2\nprecision: fp32\ntask: pretrain\n"
        "data:\n  shards: [shards/a, shards/b]\n  weights: [1, 2.5]\n  frame_stride: 4\n  flip: true\n"
        "model:\n  size: tiny\n  num_frames: 4\n  image_size: 16\n  patch_size: 8\n  mask_ratio: 0.5\n"
        "optimizer:\n  base_lr: 1.6e-2\n  warmup_epochs: 16\n"
    )


BUILDERS: dict[str, Callable[[Path], None]] = {
    "secret": draw_secret,
    "videos": draw_videos,
    "tar": make_tar,
    "lists": make_lists,
    "dataset": make_dataset,
    "run": make_run,
    "classifier": make_classifier,
    "weights": make_weights,
    "config": make_config,
}


class Materials:
    """Each made when it is first asked for, in a process of its own: the one that forks must never have decoded."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def folder(self, name: str) -> Path:
        path = self._folder / name / "material"
        if not path.exists():
            path.mkdir(parents=True)
            child = os.fork()
            if child == 0:
                try:
                    BUILDERS[name](path)
                    os._exit(0)
                except BaseException:
                    traceback.print_exc()
                    os._exit(1)
            if os.waitpid(child, 0)[1]:
                raise RuntimeError(f"the material {name} cannot be made")
        return path

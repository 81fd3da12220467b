"""What NVDEC takes is asked of its driver, and decides who decodes what."""

import ctypes
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from made_videos import encode, store, write_shards

from common.errors import InputError
from pipeline.config import DataConfig
from pipeline.decoding import nvdec
from pipeline.decoding.nvdec import CODECS, Limits, NvdecError, read_limits
from pipeline.decoding.policy import DecoderPolicy
from pipeline.shards.dataset import ShardDataset

CUDA = torch.device("cuda", 0)
BIG = Limits(48, 48, 4096, 4096, 65536 * 256)


class Driver:
    """Answers as the driver of an A100 does, which knows no AV1, through the bytes of the struct."""

    error = error_of_mpeg4 = 0

    def cuvidGetDecoderCaps(self, pointer: object) -> int:
        content = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ubyte * 88)).contents  # type: ignore[arg-type]
        codec, chroma, bits_above_8 = (int.from_bytes(content[at : at + 4], "little") for at in (0, 4, 8))
        assert (chroma, bits_above_8) == (1, 0)
        content[24], content[25] = codec != 11, 5
        for at, size, value in ((28, 4, 4096), (32, 4, 2048), (36, 4, 32768), (40, 2, 48), (42, 2, 16)):
            content[at : at + size] = value.to_bytes(size, "little")
        return self.error if codec != 2 or not self.error_of_mpeg4 else self.error_of_mpeg4


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[Driver]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Driver


def test_the_driver_says_what_it_decodes(driver: type[Driver]) -> None:
    limits = read_limits(CUDA)
    assert limits.keys() == CODECS.keys() - {"av1"}
    assert set(limits.values()) == {Limits(48, 16, 4096, 2048, 32768 * 256, step=16, num_decoders=5)}


@pytest.mark.parametrize(
    ("width", "height", "fits"),
    [(48, 16, True), (32, 16, False), (48, 0, False), (4096, 2048, True), (4112, 16, False), (48, 2064, False)],
)
def test_sizes_are_checked(driver: type[Driver], width: int, height: int, fits: bool) -> None:
    assert read_limits(CUDA)["h264"].admit(width, height) == fits


def test_areas_are_checked() -> None:
    assert Limits(max_area=100).admit(10, 10)
    assert not Limits(max_area=100).admit(10, 11)


def test_an_error_of_the_driver_is_named(driver: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "error", 201)
    with pytest.raises(NvdecError, match="CUDA error 201"):
        read_limits(CUDA)


def test_an_error_about_one_codec_ends_no_other(driver: type[Driver], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "error_of_mpeg4", 801)
    assert read_limits(CUDA).keys() == CODECS.keys() - {"av1", "mpeg4"}


def test_a_missing_library_is_named_with_its_usual_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvdec, "LIBRARY", "libnvcuvid-that-is-nowhere.so.1")
    with pytest.raises(NvdecError, match=r"libnvcuvid-that-is-nowhere\.so\.1 is not here.*NVIDIA_DRIVER_CAPABILITIES"):
        read_limits(CUDA)


def choice_on_a_gpu(shards: Path, limits: dict[str, Limits] | str, **settings: Any) -> DecoderPolicy:
    """For a GPU whose NVDEC has these limits, or cannot be reached for this reason."""

    def answer(device: torch.device) -> dict[str, Limits]:
        if isinstance(limits, str):
            raise NvdecError(limits)
        return limits

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.decoding.policy.read_limits", answer)
        return DecoderPolicy(
            ShardDataset.open(shards), CUDA, DataConfig(frame_stride=1, **{"num_threads": 3, **settings})
        )


def test_without_nvdec_pyav_decodes_and_the_user_is_told(
    short_shards: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice = choice_on_a_gpu(short_shards, "its library is not here")
    assert choice.without_dali
    assert choice.suits(0) is None
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: DALI does not decode h264 on cuda, since its library is not here")
    assert line.endswith("holds it: PyAV does, on 3 CPU threads")

    monkeypatch.setenv("LOCAL_RANK", "1")
    choice_on_a_gpu(short_shards, "its library is not here")
    assert capfd.readouterr().err == "", "once a node"


@pytest.mark.parametrize("decoder", ["dali", "hybrid"])
def test_dali_that_was_asked_for_and_cannot_be_had_is_an_error(short_shards: Path, decoder: str) -> None:
    with pytest.raises(InputError, match=r"since its library is not here, .* set data\.decoder to auto"):
        choice_on_a_gpu(short_shards, "its library is not here", decoder=decoder)


def test_a_codec_that_this_gpu_lacks_goes_to_pyav(short_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert choice_on_a_gpu(short_shards, {"vp9": BIG}).suits(0) is None
    assert "DALI does not decode h264 on cuda, and" in capfd.readouterr().err


def test_videos_of_a_size_that_nvdec_does_not_take_go_to_pyav(
    short_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert choice_on_a_gpu(short_shards, {"h264": BIG}).suits(0) == "videos"
    assert choice_on_a_gpu(short_shards, {"h264": Limits(min_width=65)}).suits(0) is None, "they are 64 pixels wide"
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("width", "height", "fits"), [(352, 256, True), (342, 256, False), (340, 256, False), (640, 360, False)]
)
def test_sides_that_are_no_multiples_of_16_go_to_pyav(
    driver: type[Driver], tmp_path: Path, width: int, height: int, fits: bool
) -> None:
    """NVDEC's decoders would be made anew for every clip, or taken from a video of another size."""
    limits = read_limits(CUDA)
    video = encode(2, width=width, height=height)
    choice = choice_on_a_gpu(write_shards(tmp_path / "data", [("v0", video)]), limits)
    assert (choice.suits(0) == "videos") == fits


def test_pictures_need_no_nvdec(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Nor a size of their own; those of shards of earlier versions are not to be had one by one."""
    shards = write_shards(tmp_path / "data", [("v0", store("mjpeg", 3, width=80, height=50))])
    assert choice_on_a_gpu(shards, "its library is not here").suits(0) == "images"
    assert choice_on_a_gpu(shards, {"h264": BIG}).suits(0) == "images"
    assert capfd.readouterr().err == ""
    old = write_shards(tmp_path / "old", [("v0", encode(3, codec="mjpeg", container="avi"))], container="avi")
    assert choice_on_a_gpu(old, {"h264": BIG}).suits(0) is None
    assert "DALI does not decode mjpeg on cuda, and" in capfd.readouterr().err


def test_dali_has_as_many_threads_as_the_gpu_has_decoders(driver: type[Driver], short_shards: Path) -> None:
    limits = read_limits(CUDA)
    assert limits["h264"].num_decoders == 5
    assert choice_on_a_gpu(short_shards, limits).dali_threads == 5
    assert choice_on_a_gpu(short_shards, limits, dali_threads=2).dali_threads == 2
    assert choice_on_a_gpu(short_shards, "not here", num_threads=3).dali_threads == 3
    with pytest.raises(InputError, match=r"data\.dali_threads is 0: must be at least 1"):
        DataConfig(dali_threads=0)


@pytest.mark.gpu
def test_this_gpu_decodes_h264() -> None:
    try:
        ctypes.CDLL(nvdec.LIBRARY)
    except OSError:
        with pytest.raises(NvdecError, match="is not here"):
            read_limits(CUDA)
        return
    limits = read_limits(CUDA)
    assert limits["h264"].admit(1920, 1088)  # sides are multiples of 16
    assert not limits["h264"].admit(8, 8)

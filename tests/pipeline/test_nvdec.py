"""What NVDEC takes is asked of its driver, and decides who decodes what."""

import ctypes
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from errors import InputError
from pipeline import nvdec
from pipeline.config import DataConfig
from pipeline.dataset import ShardDataset
from pipeline.making import ClipMaker
from pipeline.nvdec import CODECS, Limits, NvdecError, read_limits
from pipeline.plan import Plan

CUDA = torch.device("cuda", 0)
BIG = Limits(48, 48, 4096, 4096, 65536 * 256)


class Driver:
    """Answers as the driver of an A100 does, which knows no AV1, through the bytes of the struct."""

    error = 0

    def cuvidGetDecoderCaps(self, pointer: object) -> int:
        content = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_ubyte * 88)).contents  # type: ignore[arg-type]
        codec, chroma, bits_above_8 = (int.from_bytes(content[at : at + 4], "little") for at in (0, 4, 8))
        assert (chroma, bits_above_8) == (1, 0)
        content[24] = codec != 11
        for at, size, value in ((28, 4, 4096), (32, 4, 2048), (36, 4, 32768), (40, 2, 48), (42, 2, 16)):
            content[at : at + size] = value.to_bytes(size, "little")
        return self.error


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> type[Driver]:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Driver())
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return Driver


def test_the_driver_says_what_it_decodes(driver: type[Driver]) -> None:
    limits = read_limits(CUDA)
    assert limits.keys() == CODECS.keys() - {"av1"}
    assert set(limits.values()) == {Limits(48, 16, 4096, 2048, 32768 * 256)}


@pytest.mark.parametrize(
    ("width", "height", "fits"),
    [(48, 16, True), (47, 16, False), (48, 15, False), (4096, 2048, True), (4097, 16, False), (48, 2049, False)],
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


def test_a_missing_library_is_named_with_its_usual_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvdec, "LIBRARY", "libnvcuvid-that-is-nowhere.so.1")
    with pytest.raises(NvdecError, match=r"libnvcuvid-that-is-nowhere\.so\.1 is not here.*NVIDIA_DRIVER_CAPABILITIES"):
        read_limits(CUDA)


def maker_on_a_gpu(shards: Path, limits: dict[str, Limits] | str, decoder: str = "auto") -> ClipMaker:
    """For a GPU whose NVDEC has these limits, or cannot be reached for this reason."""

    def answer(device: torch.device) -> dict[str, Limits]:
        if isinstance(limits, str):
            raise NvdecError(limits)
        return limits

    dataset, config = ShardDataset.open(shards), DataConfig(frame_stride=1, decoder=decoder, num_threads=3)  # type: ignore[arg-type]
    plan = Plan(dataset, config, num_frames=8, image_size=32, seed=0, batch_size=4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.making.read_limits", answer)
        return ClipMaker(dataset, plan, CUDA, config, None)


def test_without_nvdec_pyav_decodes_and_the_user_is_told(
    short_shards: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    maker = maker_on_a_gpu(short_shards, "its library is not here")
    assert maker.without_dali
    assert not maker.all_by_dali
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith("note: DALI does not decode h264 on cuda, since its library is not here")
    assert line.endswith("holds it: PyAV does, on 3 CPU threads")

    monkeypatch.setenv("LOCAL_RANK", "1")
    maker_on_a_gpu(short_shards, "its library is not here")
    assert capfd.readouterr().err == "", "once a node"


def test_dali_that_was_asked_for_and_cannot_be_had_is_an_error(short_shards: Path) -> None:
    with pytest.raises(InputError, match=r"since its library is not here, .* set data\.decoder to auto"):
        maker_on_a_gpu(short_shards, "its library is not here", decoder="dali")


def test_a_codec_that_this_gpu_lacks_goes_to_pyav(short_shards: Path, capfd: pytest.CaptureFixture[str]) -> None:
    maker = maker_on_a_gpu(short_shards, {"vp9": BIG})
    assert not maker.all_by_dali
    assert "DALI does not decode h264 on cuda, and" in capfd.readouterr().err


def test_videos_of_a_size_that_nvdec_does_not_take_go_to_pyav(
    short_shards: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert maker_on_a_gpu(short_shards, {"h264": BIG}).all_by_dali
    assert not maker_on_a_gpu(short_shards, {"h264": Limits(min_width=65)}).all_by_dali, "they are 64 pixels wide"
    assert capfd.readouterr().err == ""


@pytest.mark.gpu
def test_this_gpu_decodes_h264() -> None:
    try:
        ctypes.CDLL(nvdec.LIBRARY)
    except OSError:
        with pytest.raises(NvdecError, match="is not here"):
            read_limits(CUDA)
        return
    limits = read_limits(CUDA)
    assert limits["h264"].admit(1920, 1080)
    assert not limits["h264"].admit(8, 8)

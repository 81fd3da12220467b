import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from made_videos import encode, write_shards
from safetensors import safe_open
from safetensors.torch import load_file

import extract_features
from common.errors import InputError
from model.adamae import AdaMAE
from model.config import ModelConfig
from model.weights import pretrained

CONFIG = ModelConfig(
    encoder_width=48, encoder_depth=2, encoder_heads=3, decoder_width=32, decoder_depth=2, decoder_heads=2,
    num_frames=4, image_size=32, patch_size=8, mask_ratio=0.75,
)  # fmt: skip


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", [(f"v{i}", encode(20, first=3 * i)) for i in range(7)], classes=2)


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    pretrained.save(tmp_path / "model.safetensors", AdaMAE(CONFIG).state_dict(), pretrained.make_metadata(CONFIG))
    return tmp_path / "model.safetensors"


def extract(shards: Path, output: Path, weights: Path, *more: str) -> None:
    arguments = [str(shards), str(output), "--model", str(weights), "--batch-size", "2", "--device", "cpu", *more]
    extract_features.main(extract_features.parse_arguments(arguments))


def test_every_video_once_in_order(shards: Path, weights: Path, tmp_path: Path) -> None:
    extract(shards, tmp_path / "out", weights, "--videos-per-file", "4", "--tokens")
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    assert [file.name for file in files] == ["features-00000.safetensors", "features-00001.safetensors"]
    keys = []
    for file in files:
        with safe_open(file, "pt") as opened:
            keys += json.loads(opened.metadata()["keys"])
    assert keys == [f"v{i}" for i in range(7)]
    first, second = map(load_file, files)
    assert torch.cat((first["labels"], second["labels"])).tolist() == [0, 1, 0, 1, 0, 1, 0]
    assert first["pooled"].shape == (4, 48)
    assert second["tokens"].shape == (3, 32, 48)
    torch.testing.assert_close(second["tokens"].float().mean(1), second["pooled"], atol=2e-3, rtol=0)
    assert len(torch.cat((first["pooled"], second["pooled"])).unique(dim=0)) == 7


def test_stopped_and_started_again_gives_the_same(shards: Path, weights: Path, tmp_path: Path, monkeypatch) -> None:
    """Also where a file in the middle is missing."""
    extract(shards, tmp_path / "whole", weights, "--videos-per-file", "2")
    original, calls = extract_features.encode_batch, []

    def stop_after_three(*arguments):
        calls.append(1)
        if len(calls) > 3:
            raise KeyboardInterrupt
        return original(*arguments)

    monkeypatch.setattr(extract_features, "encode_batch", stop_after_three)
    parts = tmp_path / "parts"
    with pytest.raises(KeyboardInterrupt):
        extract(shards, parts, weights, "--videos-per-file", "2")
    assert len(list(parts.glob("*.safetensors"))) == 3
    calls.clear()
    extract(shards, parts, weights, "--videos-per-file", "2")
    assert len(calls) == 1  # only what was missing
    monkeypatch.undo()
    (parts / "features-00001.safetensors").unlink()
    extract(shards, parts, weights, "--videos-per-file", "2")
    for file in (tmp_path / "whole").glob("*.safetensors"):
        assert file.read_bytes() == (parts / file.name).read_bytes()


def test_clips_are_cut_as_the_run_was_trained(shards: Path, write_run: Callable[..., Path], tmp_path: Path) -> None:
    run = write_run(AdaMAE(CONFIG), frame_stride=3)
    for stride, more in ((3, ()), (2, ("--frame-stride", "2"))):
        extract(shards, tmp_path / f"by {stride}", run, *more)
        assert json.loads((tmp_path / f"by {stride}/features.json").read_text())["frame_stride"] == stride


def test_another_request_for_the_same_folder_is_refused(shards: Path, weights: Path, tmp_path: Path) -> None:
    extract(shards, tmp_path / "out", weights)
    with pytest.raises(InputError, match="made with another frame_stride, tokens"):
        extract(shards, tmp_path / "out", weights, "--tokens", "--frame-stride", "2")

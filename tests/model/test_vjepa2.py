"""V-JEPA 2 and 2.1 give the tokens that their authors' code gives, with tiny random encoders."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from jaxtyping import Float
from material import close
from safetensors.torch import load_file
from torch import Tensor

from adamae.common.errors import InputError
from adamae.model.encoders import vjepa2_1
from adamae.model.encoders.open_encoder import open_encoder

# Names of inputs and of what the authors' encoder gives of them.
OUTPUTS = {
    "clip": "tokens",
    "clip_frames_other": "frames_other",
    "clip_size_other": "size_other",
    "clip_nonsquare": "nonsquare",
}
# V-JEPA 2's names, in this order, and those of transformers.
RENAMED = {
    "module.backbone.": "encoder.",
    "patch_embed.proj.": "embeddings.patch_embeddings.proj.",
    "encoder.norm.": "encoder.layernorm.",
    "blocks.": "layer.",
    ".attn.": ".attention.",
}


def read_golden(
    shared_folder: Path | None, name: str
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the authors' weights, and inputs and outputs, by name."""
    file = shared_folder and shared_folder / "golden" / f"{name}.safetensors"
    if file is None or not file.is_file():
        pytest.skip("the reference values are not beside the repository")
    values = load_file(file)
    state = {}
    for key, value in values.items():
        if key.startswith("state."):
            state[key.removeprefix("state.")] = value
    return state, values


def to_transformers(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """Convert the weights of V-JEPA 2 to transformers' layout."""
    converted = {}
    for name, value in state.items():
        for ours, theirs in RENAMED.items():
            name = name.replace(ours, theirs)
        if "qkv" in name:
            for part, rows in zip(("query", "key", "value"), value.chunk(3), strict=True):
                converted[name.replace("qkv", part)] = rows.clone()
        else:
            converted[name] = value
    return converted


def test_vjepa2_of_transformers_equals_the_authors(
    shared_folder: Path | None, tmp_path: Path
) -> None:
    state, values = read_golden(shared_folder, "vjepa2_encoder")
    options: dict[str, Any] = {
        "hidden_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "crop_size": 64,
        "frames_per_clip": 8,
        "pred_hidden_size": 24,
        "pred_num_attention_heads": 2,
        "pred_num_hidden_layers": 1,
    }
    model = transformers.VJEPA2Model(transformers.VJEPA2Config(**options))
    report = model.load_state_dict(to_transformers(state), strict=False)
    assert all(name.startswith("predictor.") for name in report.missing_keys)
    assert not report.unexpected_keys
    model.save_pretrained(tmp_path)
    transformers.VJEPA2VideoProcessor().save_pretrained(tmp_path)
    for source, result in list(OUTPUTS.items())[:3]:
        clip = values[f"input.{source}"]
        encoder = open_encoder(tmp_path, num_frames=clip.shape[1], image_size=clip.shape[2])
        close(encoder.tokens(clip), values[f"output.{result}"])
    # Its own size and number of frames are those of the published models.
    assert open_encoder(tmp_path).image_size == (256, 256)
    assert open_encoder(tmp_path).num_frames == 8
    with pytest.raises(InputError, match="takes square frames, not 80×48 pixels"):
        open_encoder(tmp_path, image_size=[48, 80])


def write_as_published(state: dict[str, Tensor], file: Path, key: str) -> None:
    """Write a file like the authors': an encoder, another one, a predictor and an optimizer."""
    other = {name: torch.zeros_like(value) for name, value in state.items()}
    contents = {"encoder": other, "predictor": {}, "opt": {"state": {0: other}}, "epoch": 7}
    torch.save({**contents, key: state}, file)


def test_vjepa2_1_equals_the_authors(
    shared_folder: Path | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state, values = read_golden(shared_folder, "vjepa2_1_encoder")
    file = tmp_path / "vjepa2_1_vitb_dist_vitG_384.pt"
    # A table of positions is in some files, and the encoder does not use it.
    state["module.backbone.pos_embed"] = torch.ones(1, 64, 64)
    write_as_published(state, file, "ema_encoder")
    # Published encoders have heads of 64 channels.
    monkeypatch.setattr(vjepa2_1, "HEAD_WIDTH", 32)
    for source, result in OUTPUTS.items():
        clip = values[f"input.{source}"]
        num_frames, height, width = clip.shape[1:4]
        encoder = open_encoder(file, num_frames=num_frames, image_size=[height, width])
        tokens = encoder.tokens(clip)
        close(tokens, values[f"output.{result}"], within=2e-6)
        close(encoder.pooled(clip), tokens.mean(dim=1))
    write_as_published(state, file, "target_encoder")
    of_other_key = open_encoder(file, num_frames=8, image_size=64)
    close(of_other_key.tokens(values["input.clip"]), values["output.tokens"], within=2e-6)
    published = open_encoder(file)
    assert (published.num_frames, published.image_size) == (64, (384, 384))
    with pytest.raises(InputError, match="at least 32×32 pixels"):
        open_encoder(file, image_size=[16, 64])


def test_files_that_hold_no_encoder_of_vjepa2_1(shared_folder: Path | None, tmp_path: Path) -> None:
    state, _ = read_golden(shared_folder, "vjepa2_encoder")
    file = tmp_path / "vitl.pt"
    write_as_published(state, file, "target_encoder")
    with pytest.raises(
        InputError, match=r"is a V-JEPA 2\.0, .* hf://facebook/vjepa2-vitl-fpc64-256"
    ):
        open_encoder(file)
    state, _ = read_golden(shared_folder, "vjepa2_1_encoder")
    del state["module.backbone.blocks.3.attn.qkv.bias"]
    write_as_published(state, file, "target_encoder")
    with pytest.raises(InputError, match=r"missing keys: blocks\.3\.attn\.qkv\.bias"):
        open_encoder(file)


def test_rotations_of_a_small_grid() -> None:
    rope: Float[Tensor, "N 2d"] = vjepa2_1.rotary_positions((2, 2, 3), 16)
    sine, cosine = rope.chunk(2, dim=1)
    # Four channels for each axis; the last four are not rotated.
    assert not sine[:, 12:].any()
    assert (cosine[:, 12:] == 1).all()
    # The last token is in the second token frame, at the end of the last row.
    angles = torch.tensor([1.0, 1, 0.01, 0.01, 15, 15, 0.15, 0.15, 15, 15, 0.15, 0.15])
    close(sine[-1, :12], angles.sin())
    close(cosine[-1, :12], angles.cos())

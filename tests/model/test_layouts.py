"""Layouts of other projects.

Round trips are exact, one sentence lists all that does not fit, and configurations are read off
them.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from material import small
from runs import is_same
from safetensors.torch import save_file
from tiny import randomize

from adamae.common.errors import InputError
from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import SIZES, ModelConfig
from adamae.model.state_dict import ENCODER_PARTS, StateDict, select
from adamae.model.tokenizer import position_table
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import from_external, to_external
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import infer_config

LAYOUTS = ["adamae", "videomae", "huggingface"]


@pytest.mark.parametrize(
    "changes",
    [{}, {"sampler": "mlp"}, {"sampler_depth": 2}, {"tubelet_size": 4}, {"tubelet_size": 1}],
    ids=str,
)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_round_trip_leaves_out_at_most_the_sampler(layout: str, changes: dict[str, Any]) -> None:
    config = small(**changes)
    for model in (AdaMAE(config), VideoClassifier(config, num_classes=5)):
        randomize(model)
        expected = model.state_dict()
        state = from_external(to_external(expected, layout, config.tubelet_size))
        if layout != "adamae":
            sampler = [name for name in expected if name.startswith("token_sampler.")]
            for name in sampler:
                del expected[name]
        assert is_same(state, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_error_lists_all_that_is_wrong(layout: str, tmp_path: Path) -> None:
    state = to_external(AdaMAE(small()).state_dict(), layout)
    missing = "decoder.embed.weight"
    del state["encoder_to_decoder.weight"]
    if layout == "adamae":
        missing += ", token_sampler.positions"
        del state["encoder.pos_embed_probs"]
    state["decoder.norm.bias"] = torch.zeros(5)
    state["what.is.this"] = torch.zeros(1)
    save_file(state, tmp_path / "a.safetensors")
    with pytest.raises(InputError) as error:
        pretrained.load(tmp_path / "a.safetensors")
    for fault in (
        f"missing keys: {missing}; ",
        "unexpected keys: what.is.this; ",
        "of another shape: decoder.norm.bias (5,) instead of (32,)",
    ):
        assert fault in str(error.value)


def test_what_the_authors_layout_has_no_place_for() -> None:
    with pytest.raises(InputError, match="width of its own"):
        to_external(AdaMAE(small(sampler_width=24)).state_dict(), "adamae")
    with pytest.raises(InputError, match="no token sampler"):
        to_external(AdaMAE(small(masking="tube")).state_dict(), "adamae")


@pytest.mark.parametrize(
    "config", [*map(ModelConfig, SIZES), ModelConfig(num_frames=32, image_size=112)]
)
def test_config_is_read_off_the_weights(config: ModelConfig) -> None:
    with torch.device("meta"):
        state = AdaMAE(config).state_dict()
    inferred = infer_config(state, config.num_frames)
    assert inferred.dimensions == config.dimensions
    for name in (
        "grid",
        "patch_values",
        "num_visible",
        "masking",
        "sampler",
        "sampler_dimension",
        "sampler_depth",
    ):
        assert getattr(inferred, name) == getattr(config, name), name
    if config.num_frames == 32:
        # Of 16 frames, 784 tokens would be 8 token frames of 98, which is no square.
        with pytest.raises(InputError, match=r"784 tokens.*number of frames"):
            infer_config(state, num_frames=16)


def load_state(file: Path) -> StateDict:
    return pretrained.load(file, num_frames=4).state


@pytest.mark.parametrize("prefix", ["model.", "backbone.", "module.net.", "module._orig_mod."])
@pytest.mark.parametrize("layout", ["", *LAYOUTS])
def test_what_wrappers_put_before_names_is_removed(
    tmp_path: Path, prefix: str, layout: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning and MMAction2 train a model that is a part of another module."""
    for model in (AdaMAE(small()), VideoClassifier(small(), num_classes=5)):
        randomize(model)
        state = model.state_dict()
        if layout:
            state = to_external(state, layout)
        save_file(state, tmp_path / "plain.safetensors")
        wrapped = {prefix + name: value for name, value in state.items()}
        save_file(wrapped, tmp_path / "wrapped.safetensors")
        expected = load_state(tmp_path / "plain.safetensors")
        assert is_same(load_state(tmp_path / "wrapped.safetensors"), expected)
    assert "left out" not in capsys.readouterr().err


def test_wrappers_of_single_modules_are_removed(tmp_path: Path) -> None:
    expected = AdaMAE(small()).state_dict()
    state = {
        name.replace("blocks.0.", "blocks.0._checkpoint_wrapped_module.").replace(
            "encoder.", "encoder._fsdp_wrapped_module."
        ): value
        for name, value in expected.items()
    }
    assert not state.keys() & {"encoder.norm.weight", "encoder.blocks.0.norm1.weight"}
    save_file(state, tmp_path / "fsdp.safetensors")
    assert is_same(load_state(tmp_path / "fsdp.safetensors"), expected)


def test_what_stands_beside_a_wrapped_model_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = AdaMAE(small()).state_dict()
    file = tmp_path / "w.safetensors"
    state = {f"model.{name}": value for name, value in expected.items()}
    save_file(state | {"criterion.weight": torch.ones(3)}, file)
    assert is_same(load_state(file), expected)
    assert "only what is called model.… is read: criterion is left out" in capsys.readouterr().err
    teacher = {f"teacher.{name}": value.clone() for name, value in expected.items()}
    save_file(state | teacher, file)
    with pytest.raises(InputError, match=r"holds several models, model\., teacher\.: save one"):
        pretrained.load(file)


def test_the_last_norm_of_an_encoder_alone_is_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Fine-tuned VideoMAEs call it `norm`, without `encoder.`."""
    model = AdaMAE(small())
    randomize(model)
    encoder = select(model.state_dict(), ENCODER_PARTS)
    state = to_external(encoder, "videomae")
    assert {"norm.weight", "patch_embed.proj.weight", "blocks.1.norm1.bias"} <= state.keys()
    file = tmp_path / "w.safetensors"
    save_file(state, file)
    assert is_same(load_state(file), encoder)
    capsys.readouterr()
    # That of a mean of all tokens is another one: an encoder has no use for it, and it is named.
    for name in ("weight", "bias"):
        state[f"fc_norm.{name}"] = state.pop(f"norm.{name}")
    save_file(state, file)
    assert "encoder.norm.weight" not in load_encoder(file).state_dict()
    assert "`norm`, which follows the mean of all tokens, is left out" in capsys.readouterr().err
    save_file(state | {"cls_token": torch.ones(1, 1, 48)}, file)
    with pytest.raises(InputError, match="unexpected keys: cls_token"):
        pretrained.load(file)


def test_a_classifier_of_mmaction2(tmp_path: Path) -> None:
    model = VideoClassifier(small(), num_classes=5)
    randomize(model)
    state = {}
    for name, value in to_external(model.state_dict(), "videomae").items():
        name = name.replace("patch_embed.proj.", "patch_embed.projection.")
        name = name.replace("mlp.fc1.", "mlp.layers.0.0.").replace("mlp.fc2.", "mlp.layers.1.")
        is_head = name.startswith("head.")
        state[name.replace("head.", "cls_head.fc_cls.") if is_head else f"backbone.{name}"] = value
    # 32 tokens
    state["backbone.pos_embed"] = position_table("flat-1d", (2, 4, 4), 48)[None].contiguous()
    file = tmp_path / "w.safetensors"
    save_file(state, file)
    assert is_same(load_state(file), model.state_dict())
    state["backbone.pos_embed"] = torch.randn(1, 32, 48)
    save_file(state, file)
    with pytest.raises(InputError, match="unexpected keys: pos_embed"):
        pretrained.load(file)

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
from adamae.model.weights import pretrained
from adamae.model.weights.external_layouts import from_external, to_external
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

import pytest
import torch
from material import randomize, small

from common.errors import InputError
from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import SIZES, ModelConfig
from model.weights.layouts import (
    from_adamae,
    from_huggingface,
    from_videomae,
    infer_config,
    to_adamae,
    to_huggingface,
    to_videomae,
)

WAYS = {
    "adamae": (to_adamae, from_adamae),
    "videomae": (to_videomae, from_videomae),
    "huggingface": (to_huggingface, from_huggingface),
}
ADAPTIVE = [{}, {"sampler": "mlp"}, {"sampler_depth": 2}, {"tubelet_size": 4}, {"tubelet_size": 1}]


def same(state: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return state.keys() == other.keys() and all(torch.equal(state[name], other[name]) for name in state)


@pytest.mark.parametrize("changes", ADAPTIVE, ids=str)
def test_adaptive_round_trip(changes) -> None:
    config = small(**changes)
    state = AdaMAE(config).state_dict()
    assert same(from_adamae(to_adamae(state, config.tubelet_size)), state)


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(layout, kind) for layout in WAYS for kind in ("tube", "classifier") if (layout, kind) != ("adamae", "tube")],
)
def test_round_trip_without_sampler(layout, kind) -> None:
    there, back = WAYS[layout]
    model = AdaMAE(small(masking="tube")) if kind == "tube" else VideoClassifier(small(), num_classes=5)
    randomize(model)
    assert same(back(there(model.state_dict())), model.state_dict())


@pytest.mark.parametrize("layout", ["videomae", "huggingface"])
def test_the_sampler_is_left_out_where_there_is_no_place_for_it(layout) -> None:
    there, back = WAYS[layout]
    state = AdaMAE(small()).state_dict()
    kept = {name: value for name, value in state.items() if not name.startswith("token_sampler.")}
    assert len(kept) < len(state)
    assert same(back(there(state)), kept)


@pytest.mark.parametrize("layout", WAYS)
def test_one_error_lists_all_that_is_wrong(layout) -> None:
    there, back = WAYS[layout]
    state = there(AdaMAE(small(masking="adaptive" if layout == "adamae" else "random")).state_dict())
    del state["encoder_to_decoder.weight"]
    state["decoder.norm.bias"] = torch.zeros(5)
    state["what.is.this"] = torch.zeros(1)
    with pytest.raises(InputError) as error:
        back(state)
    message = str(error.value)
    assert "missing keys: decoder.embed.weight" in message
    assert "unexpected keys: what.is.this" in message
    assert "of another shape: decoder.norm.bias (5,) instead of (32,)" in message


def test_a_missing_sampler_is_reported_by_from_adamae() -> None:
    state = to_adamae(AdaMAE(small()).state_dict())
    del state["encoder.pos_embed_probs"]
    with pytest.raises(InputError, match=r"missing keys: token_sampler\.positions$"):
        from_adamae(state)


def test_a_sampler_is_unexpected_in_videomae() -> None:
    with pytest.raises(InputError, match=r"unexpected keys: encoder\.get_token_probs"):
        from_videomae(to_adamae(AdaMAE(small()).state_dict()))


def test_what_the_authors_layout_has_no_place_for() -> None:
    with pytest.raises(InputError, match="width of its own"):
        to_adamae(AdaMAE(small(sampler_width=24)).state_dict())
    with pytest.raises(InputError, match="no token sampler"):
        to_adamae(AdaMAE(small(masking="tube")).state_dict())


@pytest.mark.parametrize("size", SIZES)
def test_config_is_read_off_the_weights(size) -> None:
    config = ModelConfig(size=size)
    with torch.device("meta"):
        state = AdaMAE(config).state_dict()
    inferred = infer_config(state)
    assert inferred.dimensions == config.dimensions
    for name in ("grid", "patch_values", "num_visible", "masking", "sampler", "sampler_dimension", "sampler_depth"):
        assert getattr(inferred, name) == getattr(config, name), name


def test_config_of_another_clip_shape() -> None:
    with torch.device("meta"):
        state = AdaMAE(ModelConfig(num_frames=32, image_size=112)).state_dict()
    inferred = infer_config(state, num_frames=32)
    assert (inferred.num_frames, inferred.image_size) == (32, 112)
    with pytest.raises(InputError, match=r"784 tokens.*number of frames"):
        infer_config(state, num_frames=16)

"""The model agrees with the literal restatement of the paper in `oracle.py`: values to 1e-5, and gradients."""

import oracle
import pytest
from material import close, random_clip, random_ids, randomize, small

from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.weights.layouts import to_external

VARIANTS = [
    {},
    {"loss": "l1"},
    {"normalize_target": False},
    {"loss": "l1", "normalize_target": False},
    {"sampler": "mlp"},
    {"sampler_depth": 2},
    {"decoder_depth": 1},
    {"tubelet_size": 4, "num_frames": 8},
    {"masking": "random"},
    {"sampling_loss_weight": 2e-4},
]


@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_values_and_gradients(changes, given_ids) -> None:
    config = small(**changes)
    model = AdaMAE(config).eval()
    randomize(model)
    clip = random_clip(config)
    visible_ids, masked_ids = random_ids(config)
    given_ids(visible_ids, masked_ids)
    output = model(clip, 0, 0)
    output.loss.backward()

    named = dict(model.named_parameters())
    layout = "adamae" if config.masking == "adaptive" else "videomae"
    state = {
        name: value.double() for name, value in to_external(model.state_dict(), layout, config.tubelet_size).items()
    }
    for value in state.values():
        value.requires_grad_()
    shape = oracle.Shape(config.tubelet_size, 8, 3, 2, config.loss, config.normalize_target)
    expected = oracle.adamae(state, clip, visible_ids, masked_ids, shape)

    close(output.pred, expected.pred)
    close(output.loss_per_token, expected.loss_per_token)
    close(output.reconstruction_loss, expected.reconstruction_loss)
    loss = expected.reconstruction_loss
    if config.masking == "adaptive":
        close(output.log_probs.exp(), expected.probabilities)
        close(output.sampling_loss, expected.sampling_loss)
        loss = loss + config.sampling_loss_weight * expected.sampling_loss
    loss.backward()
    gradients = to_external({name: value.grad for name, value in named.items()}, layout, config.tubelet_size)
    assert gradients.keys() == state.keys()
    for name, gradient in gradients.items():
        close(gradient, state[name].grad, name)


def test_classifier() -> None:
    model = VideoClassifier(small(), num_classes=5).eval()
    randomize(model)
    state = {name: value.double() for name, value in to_external(model.state_dict(), "adamae").items()}
    clip = random_clip(small())
    close(model(clip), oracle.classifier(state, clip, oracle.Shape(2, 8, 3, 2)))

"""The model agrees with the literal restatement of the paper in `oracle.py`: values to 1e-5, and gradients."""

import oracle
import pytest
import torch
from material import random_clip, random_ids, randomize, small

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
        loss = loss + 1e-4 * expected.sampling_loss
    loss.backward()
    gradients = to_external({name: value.grad for name, value in named.items()}, layout, config.tubelet_size)
    assert gradients.keys() == state.keys()
    for name, gradient in gradients.items():
        close(gradient, state[name].grad, name)


def test_encoder_output(given_ids) -> None:
    config = small()
    model = AdaMAE(config).eval()
    randomize(model)
    ids = random_ids(config)
    given_ids(*ids)
    outputs = []
    model.encoder.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model(random_clip(config), 0, 0)
    state = {name: value.double() for name, value in to_external(model.state_dict(), "adamae").items()}
    close(outputs[0], oracle.adamae(state, random_clip(config), *ids, oracle.Shape(2, 8, 3, 2)).encoded)


def test_classifier() -> None:
    model = VideoClassifier(small(), num_classes=5).eval()
    randomize(model)
    state = {name: value.double() for name, value in to_external(model.state_dict(), "adamae").items()}
    clip = random_clip(small())
    close(model(clip), oracle.classifier(state, clip, oracle.Shape(2, 8, 3, 2)))


def close(value: torch.Tensor, expected: torch.Tensor, name: str = "") -> None:
    expected = expected.float()
    torch.testing.assert_close(
        value, expected, rtol=0, atol=1e-5 * max(expected.abs().max().item(), 1e-3), msg=lambda text: f"{name}: {text}"
    )

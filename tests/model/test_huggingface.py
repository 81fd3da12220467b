"""Parity with Hugging Face's VideoMAE: outputs, losses and gradients of equal weights, to 1e-5."""

from pathlib import Path
from typing import Any

import pytest
import torch
from material import close, give_ids, random_clip, random_ids, small
from test_export import pixel_values
from tiny import randomize
from torch import Tensor
from transformers import (
    VideoMAEConfig,
    VideoMAEForPreTraining,
    VideoMAEForVideoClassification,
    VideoMAEModel,
)

from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.weights.external_layouts import from_external
from adamae.model.weights.load_model import load_encoder
from adamae.model.weights.read_config import HUGGINGFACE_KEYS

# VideoMAE has no token sampler.
CONFIG = small(masking="random")


def huggingface_config(config: ModelConfig = CONFIG, **changes: Any) -> VideoMAEConfig:
    values = vars(config) | config.dimensions._asdict()
    named = {key: values[name] for name, key in HUGGINGFACE_KEYS.items()}
    # Hidden layers are four times as wide, as in every Block here.
    return VideoMAEConfig(
        **named,
        intermediate_size=192,
        decoder_intermediate_size=128,
        layer_norm_eps=1e-6,
        **changes,
    )


def compare_gradients(
    model: torch.nn.Module, loss: Tensor, reference: torch.nn.Module, expected_loss: Tensor
) -> None:
    """Check that losses and the gradients of all parameters are equal, to 1e-5."""
    close(loss, expected_loss)
    loss.backward()
    expected_loss.backward()
    expected = from_external({name: value.grad for name, value in reference.named_parameters()})
    for name, value in model.named_parameters():
        close(value.grad, expected[name], name)


@pytest.mark.parametrize(
    "changes",
    [{}, {"normalize_target": False}, {"decoder_depth": 1}, {"tubelet_size": 4, "num_frames": 8}],
    ids=str,
)
def test_pretraining(changes: dict[str, Any]) -> None:
    config = small(masking="random", **changes)
    reference = VideoMAEForPreTraining(huggingface_config(config, use_mean_pooling=False)).eval()
    # It is 1e-5 there, whatever the configuration says.
    reference.decoder.norm.eps = 1e-6
    randomize(reference)
    model = AdaMAE(config)
    clip = random_clip(config)
    model.load_state_dict(from_external(reference.state_dict()))
    visible_ids, masked_ids = random_ids(config)
    give_ids(model, visible_ids, masked_ids)
    is_masked = torch.ones(2, config.num_tokens, dtype=torch.bool).scatter(1, visible_ids, False)
    expected = reference(pixel_values(clip), is_masked)
    output = model(clip, 0, 0)
    close(output.pred, expected.logits)
    compare_gradients(model, output.loss, reference, expected.loss)


def test_a_bias_of_the_keys_is_left_out() -> None:
    """Some versions of transformers have one."""
    name = "videomae.encoder.layer.0.attention.attention.key.bias"
    assert not from_external({name: torch.ones(48)})


def test_classification() -> None:
    reference = VideoMAEForVideoClassification(huggingface_config(num_labels=7)).eval()
    reference.fc_norm.eps = 1e-6
    randomize(reference)
    model = VideoClassifier(CONFIG, num_classes=7)
    clip = random_clip(CONFIG)
    labels = torch.tensor([3, 5])
    model.load_state_dict(from_external(reference.state_dict()))
    expected = reference(pixel_values(clip), labels=labels)
    logits = model(clip)
    close(logits, expected.logits)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    compare_gradients(model, loss, reference, expected.loss)


@pytest.mark.parametrize("kind", [VideoMAEModel, VideoMAEForPreTraining])
@pytest.mark.parametrize("mean_pooling", [True, False])
def test_a_folder_with_an_encoder_alone_or_without_its_last_norm(
    kind: Any, mean_pooling: bool, tmp_path: Path
) -> None:
    reference = kind(huggingface_config(use_mean_pooling=mean_pooling)).eval()
    reference.save_pretrained(tmp_path)
    clip = random_clip(CONFIG)
    encoder = reference.videomae if kind is VideoMAEForPreTraining else reference
    expected = encoder(pixel_values(clip)).last_hidden_state
    close(load_encoder(tmp_path).encode(clip).tokens, expected)

"""Parity with Hugging Face's VideoMAE on shared random weights: outputs, losses and gradients to 1e-5."""

from pathlib import Path

import pytest
import torch
from material import close, random_clip, random_ids, randomize, small
from torch import Tensor
from transformers import VideoMAEConfig, VideoMAEForPreTraining, VideoMAEForVideoClassification, VideoMAEModel

from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.weights.layouts import from_external
from model.weights.models import load_encoder

CONFIG = small(masking="random")
MEAN, STD = (torch.tensor(x).view(3, 1, 1) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))


def huggingface_config(**changes) -> VideoMAEConfig:
    return VideoMAEConfig(
        image_size=32, patch_size=8, num_frames=4, tubelet_size=2, hidden_size=48, num_hidden_layers=2,
        num_attention_heads=3, intermediate_size=192, decoder_hidden_size=32, decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2, decoder_intermediate_size=128, layer_norm_eps=1e-6, **changes,
    )  # fmt: skip


def pixel_values(clip: Tensor) -> Tensor:
    """Hugging Face's input: frames first, floats already normalized."""
    return (clip.movedim(4, 2) / 255 - MEAN) / STD


@pytest.fixture
def pretraining() -> VideoMAEForPreTraining:
    theirs = VideoMAEForPreTraining(huggingface_config(use_mean_pooling=False)).eval()
    theirs.decoder.norm.eps = 1e-6  # theirs is 1e-5 whatever their configuration says
    randomize(theirs)
    return theirs


@pytest.fixture
def classification() -> VideoMAEForVideoClassification:
    theirs = VideoMAEForVideoClassification(huggingface_config(num_labels=7)).eval()
    theirs.fc_norm.eps = 1e-6
    randomize(theirs)
    return theirs


def compare_gradients(ours: torch.nn.Module, loss: Tensor, theirs: torch.nn.Module, their_loss: Tensor) -> None:
    close(loss, their_loss)
    loss.backward()
    their_loss.backward()
    expected = from_external({name: value.grad for name, value in theirs.named_parameters()})
    for name, value in ours.named_parameters():
        close(value.grad, expected[name], name)


def test_pretraining(pretraining, given_ids) -> None:
    ours = AdaMAE(CONFIG)
    ours.load_state_dict(from_external(pretraining.state_dict()))
    clip, (visible_ids, masked_ids) = random_clip(CONFIG), random_ids(CONFIG)
    given_ids(visible_ids, masked_ids)
    is_masked = torch.ones(2, CONFIG.num_tokens, dtype=torch.bool).scatter(1, visible_ids, False)

    expected = pretraining(pixel_values(clip), is_masked)
    output = ours(clip, 0, 0)
    close(output.pred, expected.logits)
    compare_gradients(ours, output.loss, pretraining, expected.loss)


def test_a_bias_of_the_keys_is_left_out() -> None:
    """Some versions of transformers have one."""
    assert not from_external({"videomae.encoder.layer.0.attention.attention.key.bias": torch.ones(48)})


def test_classification(classification) -> None:
    ours = VideoClassifier(CONFIG, num_classes=7)
    ours.load_state_dict(from_external(classification.state_dict()))
    clip, labels = random_clip(CONFIG), torch.tensor([3, 5])
    expected = classification(pixel_values(clip), labels=labels)
    logits = ours(clip)
    close(logits, expected.logits)
    compare_gradients(ours, torch.nn.functional.cross_entropy(logits, labels), classification, expected.loss)


@pytest.mark.parametrize("kind", [VideoMAEModel, VideoMAEForPreTraining])
@pytest.mark.parametrize("mean_pooling", [True, False])
def test_a_folder_with_an_encoder_alone_or_without_its_last_norm(kind, mean_pooling: bool, tmp_path: Path) -> None:
    theirs = kind(huggingface_config(use_mean_pooling=mean_pooling)).eval()
    theirs.save_pretrained(tmp_path)
    clip = random_clip(CONFIG)
    outputs = theirs.videomae if kind is VideoMAEForPreTraining else theirs
    close(load_encoder(tmp_path).encode(clip).tokens, outputs(pixel_values(clip)).last_hidden_state)

"""Values computed with the authors' published code are reproduced to 1e-5, through `from_external`."""

from pathlib import Path

import pytest
import torch
from material import close, give_ids
from safetensors.torch import load_file

from model.adamae import AdaMAE
from model.classifier import VideoClassifier
from model.config import ModelConfig
from model.weights.layouts import from_external, to_external

CONFIG = ModelConfig(
    encoder_width=64, encoder_depth=2, encoder_heads=4, decoder_width=32, decoder_depth=2, decoder_heads=2,
    image_size=32, mask_ratio=0.75,
)  # fmt: skip


@pytest.fixture(params=["adamae_pretrain", "adamae_classifier"])
def golden(request, shared_folder: Path | None) -> tuple[str, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    path = shared_folder and shared_folder / "golden" / f"{request.param}.safetensors"
    if path is None or not path.is_file():
        pytest.skip("the reference values are not beside the repository")
    values = load_file(path)
    values["clip"] = values["clip"].movedim(1, 4).contiguous()
    return request.param, values, {name[6:]: value for name, value in values.items() if name.startswith("state.")}


def test_golden(golden) -> None:
    which, values, published = golden
    (compare_pretraining if which == "adamae_pretrain" else compare_classifier)(values, published)


def compare_pretraining(golden, published) -> None:
    model = AdaMAE(CONFIG).eval()
    model.load_state_dict(from_external(published))
    give_ids(model, golden["visible_ids"], golden["masked_ids"])
    output = model(golden["clip"], 0, 0)

    close(output.log_probs.exp(), golden["probabilities"])
    close(output.pred, golden["pred"])
    close(output.loss_per_token, golden["loss_per_token"])
    for kind in ("reconstruction", "sampling"):
        loss = getattr(output, f"{kind}_loss")
        close(loss, golden[f"{kind}_loss"])
        model.zero_grad()
        loss.backward(retain_graph=True)
        gradients = {
            name: torch.zeros_like(value) if value.grad is None else value.grad
            for name, value in model.named_parameters()
        }
        for name, gradient in to_external(gradients, "adamae").items():
            if f"grad_{kind}.{name}" in golden:
                close(gradient, golden[f"grad_{kind}.{name}"])
    # The target only shows in the loss: predicted exactly, it leaves none.
    assert model.target(golden["clip"], golden["target"], golden["masked_ids"]).mean() < 1e-9


def compare_classifier(golden, published) -> None:
    model = VideoClassifier(CONFIG, num_classes=7).eval()
    model.load_state_dict(from_external(published))
    close(model.features(golden["clip"]), golden["features"])
    close(model(golden["clip"]), golden["logits"])

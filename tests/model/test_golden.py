"""Values of the authors' published code are reproduced to 1e-5, through `from_external`."""

from pathlib import Path

import pytest
import torch
from material import close, give_ids
from safetensors.torch import load_file

from adamae.model.adamae import AdaMAE
from adamae.model.classifier import VideoClassifier
from adamae.model.config import ModelConfig
from adamae.model.weights.external_layouts import from_external, to_external

# The shape of the models that the values were computed with.
CONFIG = ModelConfig(
    encoder_width=64,
    encoder_depth=2,
    encoder_heads=4,
    decoder_width=32,
    decoder_depth=2,
    decoder_heads=2,
    image_size=32,
    mask_ratio=0.75,
)


def read(
    shared_folder: Path | None, name: str
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return the values of a file, and the state dict that is among them."""
    path = shared_folder and shared_folder / "golden" / f"{name}.safetensors"
    if path is None or not path.is_file():
        pytest.skip("the reference values are not beside the repository")
    values = load_file(path)
    # [B, C, T, H, W] there.
    values["clip"] = values["clip"].movedim(1, 4).contiguous()
    state = {}
    for key, value in values.items():
        if key.startswith("state."):
            state[key.removeprefix("state.")] = value
    return values, state


def test_pretraining(shared_folder: Path | None) -> None:
    golden, published = read(shared_folder, "adamae_pretrain")
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
        gradients = {}
        for name, value in model.named_parameters():
            gradients[name] = torch.zeros_like(value) if value.grad is None else value.grad
        for name, gradient in to_external(gradients, "adamae").items():
            if f"grad_{kind}.{name}" in golden:
                close(gradient, golden[f"grad_{kind}.{name}"])
    # The target only shows in the loss: predicted exactly, it leaves none.
    loss_per_token = model.target(golden["clip"], golden["target"], golden["masked_ids"])
    assert loss_per_token.mean() < 1e-9


def test_classifier(shared_folder: Path | None) -> None:
    golden, published = read(shared_folder, "adamae_classifier")
    model = VideoClassifier(CONFIG, num_classes=7).eval()
    model.load_state_dict(from_external(published))
    close(model.features(golden["clip"]), golden["features"])
    close(model(golden["clip"]), golden["logits"])

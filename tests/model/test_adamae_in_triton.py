"""The model with its ops as Triton kernels.

They compute the references' values, and the host never waits for a step.
"""

from itertools import product

import pytest
import torch
from material import close, random_clip, small
from tiny import randomize

from adamae.model.adamae import AdaMAE
from adamae.model.registry import MASKS

# The interpreter is slow: on the CPU there is one case, which calls every op.
CASES = [
    pytest.param("cpu", "adaptive", False, id="interpreter"),
    *(
        pytest.param("cuda", masking, detach, marks=pytest.mark.gpu)
        for masking, detach in product(MASKS, (True, False))
    ),
]


@pytest.mark.parametrize(("device", "masking", "detach"), CASES)
def test_values_and_gradients_are_the_references(
    device: str, masking: str, detach: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_frames = 2 if device == "cpu" else 4
    config = small(
        masking=masking, mask_ratio=0.5, detach_sampler_input=detach, num_frames=num_frames
    )
    reference = AdaMAE(config).eval()
    model = AdaMAE(config).eval().to(device)
    randomize(reference)
    model.load_state_dict(reference.state_dict())
    clip = random_clip(config)
    expected = reference(clip, 3, 10)
    expected.loss.backward()

    monkeypatch.setattr("adamae.kernels.launch.triton_on_cpu", device == "cpu")
    output = model(clip.to(device), 3, 10)
    output.loss.backward()
    assert torch.equal(output.visible_ids.cpu(), expected.visible_ids)
    assert torch.equal(output.masked_ids.cpu(), expected.masked_ids)
    close(output.pred, expected.pred, within=1e-4)
    close(output.loss_per_token, expected.loss_per_token, within=1e-4)
    close(output.sampling_loss, expected.sampling_loss, within=1e-4)
    gradients = {name: value.grad for name, value in model.named_parameters()}
    for name, value in reference.named_parameters():
        close(gradients[name], value.grad, within=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("masking", MASKS)
def test_the_host_never_waits(masking: str, checkpointing: bool) -> None:
    config = small(masking=masking, mask_ratio=0.5, activation_checkpointing=checkpointing)
    model = AdaMAE(config).cuda()
    clip = random_clip(config).cuda()
    seed, offset = torch.zeros(2, dtype=torch.int64, device="cuda").unbind()

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(clip, seed, offset).loss
        loss.backward()

    # The first step compiles the kernels.
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")

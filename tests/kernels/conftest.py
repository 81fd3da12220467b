import pytest
import torch

from adamae.kernels import launch


@pytest.fixture
def device(monkeypatch) -> torch.device:
    """Where the Triton path of every op runs: compiled on a GPU, in Triton's interpreter on a CPU."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(launch, "triton_on_cpu", True)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """What an op allocates and does not write is NaN, -1 or True, instead of what happened to lie there."""
    plain = torch.Tensor.new_empty

    def new_empty(self, *size, **options):
        out = plain(self, *size, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

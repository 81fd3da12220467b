from typing import Any

import pytest
import torch
from torch import Tensor

from adamae.kernels import launch


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Return where the Triton path of every op runs: a GPU, or a CPU in Triton's interpreter."""
    if torch.cuda.is_available():
        return torch.device("cuda")
    monkeypatch.setattr(launch, "triton_on_cpu", True)
    return torch.device("cpu")


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill what ops allocate with NaN, -1 or True, instead of what happened to lie there.

    Every op makes its outputs by `new_empty`.
    """
    plain = Tensor.new_empty

    def new_empty(self: Tensor, *size: Any, **options: Any) -> Tensor:
        out = plain(self, *size, **options)
        return out.fill_(torch.nan if out.is_floating_point() else -1)

    monkeypatch.setattr(Tensor, "new_empty", new_empty)

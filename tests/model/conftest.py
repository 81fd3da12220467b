from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor


@pytest.fixture
def given_ids(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor], None]:
    """Make the token sampler return the ids that a test names."""

    def set_ids(visible_ids: Tensor, masked_ids: Tensor) -> None:
        for module in ("mask", "uniform"):
            monkeypatch.setattr(
                f"model.masking.{module}.gumbel_topk",
                lambda logits, k, seed, offset: (visible_ids, masked_ids, logits.log_softmax(-1)),
            )

    return set_ids


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """These models are too small for two; on a busy machine threads would wait for each other most of the time."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)

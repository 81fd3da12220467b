from collections.abc import Callable

import pytest
from torch import Tensor


@pytest.fixture
def given_ids(monkeypatch: pytest.MonkeyPatch) -> Callable[[Tensor, Tensor], None]:
    """Have the sampler draw the ids that a test names."""

    def set_ids(visible_ids: Tensor, masked_ids: Tensor) -> None:
        monkeypatch.setattr(
            "model.token_samplers.gumbel_topk",
            lambda logits, k, seed, offset: (visible_ids, masked_ids, logits.log_softmax(-1)),
        )

    return set_ids

"""Tasks by their names in the configuration."""

from typing import Any

from training.tasks.classification import Classification
from training.tasks.pretraining import Pretraining

TASKS: dict[str, Any] = {
    "pretrain": Pretraining, "finetune": Classification, "linear_probe": Classification,
    "attentive_probe": Classification,
}  # fmt: skip

"""The tasks, by the value of `task` in the configuration."""

from typing import Any

from adamae.training.tasks.classification import Classification
from adamae.training.tasks.pretraining import Pretraining

TASKS: dict[str, Any] = {
    "pretrain": Pretraining,
    "finetune": Classification,
    "linear_probe": Classification,
    "attentive_probe": Classification,
}

"""A mask, a target or a decoder is one file and one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from adamae.common.errors import InputError
from adamae.model.registry import MASKS, find_class

ROOT = Path(__file__).parents[2]
SCRIPT = """
from adamae.model.registry import MASKS, TARGETS

MASKS["late"] = "__main__:LateMasking"
TARGETS["brightness"] = "__main__:BrightnessTarget"

import torch

from adamae.model.adamae import AdaMAE
from adamae.model.masking import MaskingStrategy
from adamae.model.targets import Target
from adamae.training.config import parse


class LateMasking(MaskingStrategy):
    def logits(self, clip, tokens):
        return torch.arange(32.0).expand(len(clip), -1) * 10


class BrightnessTarget(Target):
    num_values = 1

    def forward(self, prepared, pred, ids):
        return (pred[..., 0] - prepared.float().mean(dim=(1, 2, 3, 4))[:, None] / 255).square()


shape = ["model.size=tiny", "model.num_frames=4", "model.image_size=32", "model.patch_size=8"]
options = ["model.mask_ratio=0.75", "model.masking=late", "model.target=brightness"]
config = parse([*shape, *options, "data.shards=none"])
output = AdaMAE(config.model)(torch.zeros(2, 4, 32, 32, 3, dtype=torch.uint8), 0, 0)
output.loss.backward()
assert output.visible_ids.min() > 16, output.visible_ids
assert output.pred.shape == (2, 24, 1)
parse(["--help"])
"""


def test_a_new_mask_and_a_new_target_are_a_class_and_a_line() -> None:
    """The command line takes them, --help lists them, and a model learns with them."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "{adaptive,random,tube,frame,motion,motion-share,late}" in done.stdout
    assert "{pixels,motion-energy,teacher,none,brightness}" in done.stdout


def test_a_name_without_a_line_is_refused() -> None:
    sentence = r"'early' is none of adaptive.*: a new one needs a line in model/registry"
    with pytest.raises(InputError, match=sentence):
        find_class(MASKS, "early")

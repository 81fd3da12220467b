"""Probes of encoders of other architectures, whose weights stay where they are."""

import shutil
from pathlib import Path

import pytest
from encoder_models import IMAGE_CASES, VIDEO_CASES
from runs import is_same, load_weights, read_rows
from safetensors.torch import load_file

from adamae.common.errors import InputError
from adamae.evaluate import evaluate, parse_arguments
from adamae.export import main as export
from adamae.export import parse_arguments as parse_export
from adamae.model.encoders.open_encoder import open_encoder
from adamae.train import train
from adamae.training.load_config import load_config

CASES = VIDEO_CASES | IMAGE_CASES


@pytest.fixture
def words(arguments: list[str], synthetic_shards: Path, tmp_path: Path) -> list[str]:
    """Return the command line of a probe of the encoder in a folder, which is yet to be written."""
    others = [argument for argument in arguments if not argument.startswith("model.")]
    return [
        *others,
        f"evaluation.shards={synthetic_shards}",
        f"init_from={tmp_path / 'encoder'}",
        "evaluation.every=1",
        "steps=2",
        "checkpoint_every=1",
        "data.flip=false",
        "finetune.mixup=0",
        "finetune.cutmix=0",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kind"),
    [("vjepa2", "attentive"), ("timesformer", "linear"), ("dinov2 with registers", "attentive")],
)
def test_a_probe_of_another_architecture_trains_resumes_and_is_evaluated(
    name: str, kind: str, words: list[str], synthetic_shards: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "encoder"
    CASES[name].write(folder)
    before = load_file(folder / "model.safetensors")
    words = [*words, f"task={kind}_probe", "finetune.ema_decay=0.5", "model.num_frames=4"]
    config = load_config(words)
    encoder = open_encoder(folder, num_frames=4)
    assert (config.model.num_frames, config.model.image_size) == (4, 32)
    train(config)
    run = Path(config.run)
    whole = load_weights(run, 2)
    width = whole["head.weight"].shape[1]
    assert width == encoder.dim
    assert {key.split(".")[0] for key in whole} <= {"head", "norm", "pool"}, "the encoder is not"
    assert is_same(load_file(folder / "model.safetensors"), before)

    shutil.rmtree(run / "checkpoints/step-00000002")
    train(load_config(words))
    assert is_same(load_weights(run, 2), whole)

    output = tmp_path / "results"
    evaluate(parse_arguments([str(run), str(synthetic_shards), "--output", str(output)]))
    best = max(row["evaluation/top1"] for row in read_rows(run) if "evaluation/top1" in row)
    assert f'"top1": {best}' in (output / "results.json").read_text()

    with pytest.raises(InputError, match=r"is the head of a probe, whose encoder is .*encoder"):
        export(parse_export(["export", str(run), str(tmp_path / "exported")]))
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4] + b"\0\0\0\0")
    with pytest.raises(InputError, match=r"has other files than when .* was trained"):
        evaluate(parse_arguments([str(run), str(synthetic_shards)]))
    with pytest.raises(InputError, match="or another encoder than init_from"):
        train(load_config(words))


def test_options_of_an_encoder_that_has_its_own(words: list[str], tmp_path: Path) -> None:
    VIDEO_CASES["vjepa2"].write(tmp_path / "encoder")
    with pytest.raises(InputError, match=r"model\.size changes nothing with the encoder"):
        load_config([*words, "task=linear_probe", "model.size=tiny"])
    with pytest.raises(InputError, match="is a vjepa2 of transformers: its features are for"):
        load_config([*words, "task=finetune"])

"""Finds the file of weights that a path stands for, and the run that it belongs to."""

from pathlib import Path

from adamae.common.errors import InputError
from adamae.model.weights.hub import find_model
from adamae.model.weights.other_models import name_other_model

# Averaged weights (EMA) go before those that were trained, and a classifier or whole model before
# an encoder.
FILE_NAMES = (
    "average.safetensors",
    "model.safetensors",
    "encoder.safetensors",
    "pytorch_model.bin",
)


def find_file(path: str | Path) -> Path:
    """Return the file of weights at `path`: a file, or in a folder or run the newest one.

    Averaged weights (EMA) go first where there are some. Raise InputError if there is none.
    """
    path = find_model(path)
    if path.is_file():
        return path
    if not path.is_dir():
        raise InputError(f"{path} does not exist: give a run folder or a checkpoint")
    kind = name_other_model(path)
    if kind:
        raise InputError(
            f"{path} is {kind}: its features are for extract_features.py, compare.py, search.py,"
            " probes and model.teacher; what is trained, shown or exported here are weights of this"
            " project or of VideoMAE"
        )
    for folder in ("", "checkpoints/step-*/"):
        for name in FILE_NAMES:
            files = sorted(path.glob(folder + name))
            if files:
                return files[-1]
    if (path / "features.json").is_file():
        raise InputError(
            f"{path} holds features, which search.py reads: give the run or the weights that they"
            " were extracted with"
        )
    raise InputError(
        f"{path} holds no checkpoint yet: give a run folder with checkpoints/, or a file of weights"
    )


def run_of(file: Path) -> Path | None:
    """Return the run directory that a file of weights is in, None if it is in none.

    RUN/model.safetensors and RUN/checkpoints/step-00000100/model.safetensors are in RUN, which has
    a config.yaml.
    """
    folder = file.absolute().parent
    for candidate in (folder, folder.parent.parent):
        if (candidate / "config.yaml").is_file():
            return candidate
    return None

"""Tells models of other libraries from weights that this project reads itself."""

from pathlib import Path
from typing import Any

from adamae.model.weights.tensor_files import read_json


def name_other_model(folder: Path) -> str:
    """Return "a dinov2 of transformers" or "a resnet50 of timm" for folders of these libraries.

    Return "" for anything else: for runs, files, and a VideoMAE of transformers, whose architecture
    is this project's.
    """
    file = folder / "config.json"
    description = read_json(file, file, dict[str, Any]) if file.is_file() else {}
    if "architecture" in description:
        return f"a {description['architecture']} of timm"
    model_type = description.get("model_type", "videomae")
    return "" if model_type == "videomae" else f"a {model_type} of transformers"

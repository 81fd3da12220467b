"""AdaMAE: self-supervised learning on your own videos.

The packages lie at the top of the repository, where readers look for them. Links beside this file
give them their import names: `from adamae.pipeline.clip_dataset import ClipDataset`.
"""

import sys
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from adamae.model.load_adamae import load_adamae
    from adamae.model.weights.load_model import load_encoder
    from adamae.pipeline.clip_dataset import ClipDataset

__version__ = "0.1.0.dev0"
__all__ = ["ClipDataset", "__version__", "load_adamae", "load_encoder"]

ROOT = Path(__file__).resolve().parents[1]


def _is_root(entry: str) -> bool:
    """Compare by inode: a relative entry has no path once the working directory is deleted."""
    return Path(entry).exists() and ROOT.samefile(Path(entry))


# Python puts the clone's root on sys.path when it starts a command of a clone. There `common`,
# `model` or `kernels` would hide packages of the same names, and transformers imports Hugging
# Face's `kernels` wherever that is installed. The links do without the root.
if (ROOT / "adamae").is_dir() and (ROOT / "pyproject.toml").is_file():
    sys.path[:] = [entry for entry in sys.path if not _is_root(entry)]

_MODULES = {
    "ClipDataset": "adamae.pipeline.clip_dataset",
    "load_adamae": "adamae.model.load_adamae",
    "load_encoder": "adamae.model.weights.load_model",
}


def __getattr__(name: str) -> Any:
    """Import what is public when it is first asked for: torch takes seconds."""
    if name not in _MODULES:
        raise AttributeError(f"module 'adamae' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)

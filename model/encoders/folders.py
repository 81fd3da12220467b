"""What folders of transformers and timm have in common: safetensors alone, no code in them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from adamae.common.errors import InputError


def require_safetensors(folder: Path) -> None:
    """Raise InputError if a folder has no weights as safetensors."""
    if not any(folder.glob("*.safetensors")):
        raise InputError(
            f"{folder} has no weights as safetensors: other formats are pickles, which can hold"
            " code; convert them, or take a revision that has safetensors"
        )


@contextmanager
def explain_damage(folder: Path, library: str) -> Iterator[None]:
    """Turn what a library raises when it reads a folder into an InputError."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        # It raises whatever the contents of the folder lead to.
        raise InputError(
            f"{folder} cannot be loaded as a model of {library}: {first_words(error)}"
        ) from error


def first_words(error: Exception) -> str:
    """Return the text of a library's error on one line, as far as a sentence can hold it."""
    return " ".join(str(error).split())[:300]

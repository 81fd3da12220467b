"""Models on the Hugging Face Hub.

By huggingface_hub, with its cache, its login, and its variables HF_ENDPOINT and HF_HUB_OFFLINE.
"""

import re
from pathlib import Path

from adamae.common.errors import InputError
from adamae.model.weights.other_models import name_other_model

# user/name, perhaps with a revision.
NAME = re.compile(r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")
# In repositories that `push_folder` writes, the same encoder once more, for timm.
TIMM_FILE = "timm.safetensors"


def find_model(name: str | Path) -> Path:
    """Return a path as it is, and for a model of the Hub the folder in which its files are.

    A model is a string that is no path here, such as `user/name` or `hf://user/name@revision`. It
    is downloaded, or taken from the cache. Raise InputError if there is no such model.
    """
    if isinstance(name, Path) or Path(name).exists():
        return Path(name)
    match = NAME.fullmatch(name)
    if match is None:
        return Path(name)
    repo, revision = match.groups()
    if revision and ".." in revision.split("/"):
        raise InputError(f"{name} has .. in its revision: give a branch, a tag or a commit")
    return _download(repo, revision)


def _download(repo: str, revision: str | None) -> Path:
    """Download weights and what describes them; raise InputError if there are none."""
    from huggingface_hub import errors, snapshot_download

    name = f"{repo}@{revision}" if revision else repo
    try:
        # PyTorch's files only where there are no safetensors.
        for kind in ("*.safetensors", "*.bin"):
            folder = snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[kind, "*.json", "*.yaml"],
                ignore_patterns=[TIMM_FILE],
            )
            if any(Path(folder).rglob(kind)):
                return Path(folder)
            _check_pickles(Path(folder), name)
    except errors.LocalEntryNotFoundError as error:
        raise InputError(
            f"{name} is neither a path here nor a model on the Hugging Face Hub that is in its"
            " cache, and it cannot be reached: check the name, or connect to the network once"
        ) from error
    except (errors.HfHubHTTPError, errors.HFValidationError) as error:
        raise InputError(
            f"{name} is neither a path here nor a model on the Hugging Face Hub that you may read:"
            " check the name, or log in with `hf auth login`"
        ) from error
    raise InputError(
        f"{repo} on the Hugging Face Hub has no weights as safetensors or .bin: name another model"
    )


def _check_pickles(folder: Path, name: str) -> None:
    """Raise InputError for a model of transformers or timm that has no safetensors.

    folder: what describes it, which is downloaded already. Only VideoMAE's pickles are read, by
    model.weights.tensor_files, which runs no code in them.
    """
    if name_other_model(folder):
        raise InputError(
            f"{name} on the Hugging Face Hub has no weights as safetensors: other formats are"
            " pickles, which can hold code; choose a revision with safetensors, such as"
            " hf://user/name@refs/pr/1, or another model"
        )


def push_folder(folder: Path, repo: str) -> None:
    """Upload a folder as the model `user/name`, which is made if there is none.

    Raise InputError if that fails.
    """
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export from AdaMAE")
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"{repo} cannot be written on the Hugging Face Hub ({reason}): give user/name, and log"
            " in with `hf auth login`"
        ) from error

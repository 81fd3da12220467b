"""Models on the Hugging Face Hub, by huggingface_hub: its cache, its login, its HF_ENDPOINT and HF_HUB_OFFLINE."""

import re
from pathlib import Path

from adamae.common.errors import InputError

NAME = re.compile(
    r"(?:hf://)?([\w.-]+/[\w.-]+)(?:@([\w./-]+))?"
)  # user/name, perhaps of a revision
TIMM_FILE = "timm.safetensors"  # of the repositories that `push_folder` writes


def find_model(name: str | Path) -> Path:
    """Return the path `name`; a string that is none, such as `user/name` or `hf://user/name@revision`, is a model of
    the Hub, which is downloaded, or taken from its cache. Raise InputError where there is no such model."""
    match = NAME.fullmatch(name) if isinstance(name, str) and not Path(name).exists() else None
    return Path(name) if match is None else _download(*match.groups())


def _download(repo: str, revision: str | None) -> Path:
    from huggingface_hub import errors, snapshot_download

    try:
        for kind in ("*.safetensors", "*.bin"):  # the second where there is none of the first
            wanted = [kind, "*.json", "*.yaml"]
            folder = snapshot_download(
                repo, revision=revision, allow_patterns=wanted, ignore_patterns=[TIMM_FILE]
            )
            if any(Path(folder).rglob(kind)):
                return Path(folder)
    except (
        errors.LocalEntryNotFoundError,
        errors.HfHubHTTPError,
        errors.HFValidationError,
    ) as error:
        said, remedy = "you may read", "log in with `hf auth login`"
        if isinstance(error, errors.LocalEntryNotFoundError):
            said, remedy = (
                "is in its cache, and it cannot be reached",
                "connect to the network once",
            )
        name = f"{repo}@{revision}" if revision else repo
        raise InputError(
            f"{name} is neither a path here nor a model on the Hugging Face Hub that {said}: check the name, or"
            f" {remedy}"
        ) from error
    raise InputError(
        f"{repo} on the Hugging Face Hub has no weights as safetensors or .bin: name another model"
    )


def push_folder(folder: Path, repo: str) -> None:
    """Upload a folder as the model `user/name`, which is made if there is none. Raise InputError where that fails."""
    from huggingface_hub import HfApi, errors

    api = HfApi()
    try:
        api.create_repo(repo, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Export from AdaMAE")
    except (errors.HTTPError, errors.HFValidationError, OSError) as error:
        reason = next(iter(str(error).splitlines()), "")
        raise InputError(
            f"{repo} cannot be written on the Hugging Face Hub ({reason}): give user/name, and log in with"
            " `hf auth login`"
        ) from error

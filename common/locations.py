"""Paths on this node, and URLs of what lies elsewhere."""

from pathlib import Path

from adamae.common.errors import InputError


def is_remote(location: str | Path) -> bool:
    """Return whether this is a URL, not a path."""
    return "://" in str(location)


def local_path(text: str, option: str = "") -> Path:
    """Return the path that an argument names, as its `type`, or that an option names.

    Raise InputError if it is a URL, of which Path would make a folder called `s3:`.
    """
    if is_remote(text):
        name = f"{option}={text}" if option else text
        raise InputError(
            f"{name} is a URL: give a path on this node (`aws s3 sync` or `rclone copy` copies"
            " between both)"
        )
    return Path(text)

"""Find files with the same bytes among the videos of an input."""

import hashlib
import os
from collections.abc import Iterable
from contextlib import suppress

from adamae.common.locations import is_remote
from adamae.shard_tools.inputs.item import Item
from adamae.shard_tools.inputs.location import Location, local_copy


def find_copies(items: Iterable[Item]) -> dict[str, str]:
    """Return the files that have the bytes of an earlier one, with the name of the first of these.

    Only files of equal sizes are read, and those behind URLs are not.
    """
    locations: dict[int, dict[str, Location]] = {}
    for item in items:
        size = item.size
        # Lists give no sizes.
        if not size and isinstance(item.location, str) and os.path.isfile(item.location):
            size = os.path.getsize(item.location)
        if size and item.problem is None and not is_remote(str(item.location)):
            locations.setdefault(size, {})[item.source] = item.location
    copies = {}
    for same_size in locations.values():
        if len(same_size) == 1:
            continue
        first_by_digest: dict[bytes, str] = {}
        for source, location in same_size.items():
            # A file that cannot be read will be rejected when it is to be encoded.
            with suppress(OSError):
                first = first_by_digest.setdefault(_hash_file(location), source)
                if first != source:
                    copies[source] = first
    return copies


def _hash_file(location: Location) -> bytes:
    with local_copy(location) as path, path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()

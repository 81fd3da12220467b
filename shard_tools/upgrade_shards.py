"""Write the tables of today's schema version beside shards of an older one; the shards stay as they are.

    python shard_tools/upgrade_shards.py FOLDER

Opening the dataset then takes no time, whatever its size. It can be interrupted and run again at any moment, and makes
damaged tables anew. Runs that have learnt from the shards before go on with them.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

from common.errors import InputError, run_command
from common.logging import log
from pipeline.shards.format import SCHEMA_VERSION, DatasetInfo, read_dataset_info
from shard_tools.build import WORK_FOLDER, locked_folder
from shard_tools.tables import publish


def upgrade(folder: Path) -> DatasetInfo:
    """Make the tables of a dataset out of its `samples.jsonl`; raises InputError if one of these is not whole."""
    info = read_dataset_info(folder)
    if (folder / WORK_FOLDER).exists():
        raise InputError(f"shards are being made in {folder}: run make_shards.py again first, which completes them")
    with locked_folder(folder):
        return publish(folder, info, upgraded_from=1 if info.schema_version == 1 or info.upgrade else None)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder of shards")
    folder = parser.parse_args(arguments).folder
    info = upgrade(folder)
    log(f"{info.num_samples} samples in {len(info.shards)} shards have tables of schema version {SCHEMA_VERSION}")
    return 0


if __name__ == "__main__":
    run_command(main, goes_on=True)

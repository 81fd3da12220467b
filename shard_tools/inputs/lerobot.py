"""LeRobot's data sets: a sample an episode and camera, with the episode's tasks and length among its fields."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from common.errors import InputError
from shard_tools.inputs.folders import make_item
from shard_tools.inputs.item import Item, Segment, import_pyarrow

INFO = "meta/info.json"


def find_sets(folder: Path) -> list[Path]:
    """List the data sets: the folder itself, or those in it."""
    found = [folder / INFO] if (folder / INFO).is_file() else sorted(folder.glob(f"*/{INFO}"))
    return [info.parent.parent for info in found if b"codebase_version" in info.read_bytes()]


def list_episodes(folder: Path, where: Path) -> Iterator[Item]:
    """Yield the episodes of a data set of version 2 (a file each) or 3 (several a file), named relative to `where`.

    Raise InputError if its tables do not say where these are.
    """
    try:
        info = json.loads((folder / INFO).read_text(encoding="utf-8"))
        cameras = [name for name, feature in info["features"].items() if feature["dtype"] == "video"]
        for episode in _read_episodes(folder):
            index = episode["episode_index"]
            for camera in cameras:
                said = {name: episode.get(f"videos/{camera}/{name}") for name in ("chunk_index", "file_index")}
                start, end = (episode.get(f"videos/{camera}/{name}_timestamp") for name in ("from", "to"))
                chunk = index // info["chunks_size"]
                name = info["video_path"].format(video_key=camera, episode_index=index, episode_chunk=chunk, **said)
                fields = {"episode": index, "camera": camera}
                fields |= {name: episode[name] for name in ("tasks", "length") if name in episode}
                item = make_item((folder / name).relative_to(where).as_posix(), folder / name)
                segment = None if start is None or end is None else Segment(start, end)
                yield item._replace(segment=segment, fields=json.dumps(fields, ensure_ascii=False))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise InputError(
            f"{folder} is a data set of LeRobot, and its tables in meta/ cannot be read ({error!r}): give the folder"
            " videos/ in it, with --unlabeled"
        ) from error


def _read_episodes(folder: Path) -> Iterator[dict[str, Any]]:
    if tables := sorted(folder.glob("meta/episodes/**/*.parquet")):
        for table in tables:
            file = import_pyarrow(str(table)).ParquetFile(table)
            columns = [name for name in file.schema_arrow.names if not name.startswith("stats/")]  # most of its bytes
            for batch in file.iter_batches(columns=columns):
                yield from batch.to_pylist()
        return
    with (folder / "meta/episodes.jsonl").open(encoding="utf-8") as lines:
        yield from map(json.loads, filter(str.strip, lines))

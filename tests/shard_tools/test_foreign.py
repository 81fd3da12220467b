"""What other programs write is no list of videos: one sentence says what to export."""

from pathlib import Path

import pytest

from adamae.common.errors import InputError
from adamae.shard_tools.inputs import read_inputs

MARKERS = (
    "Marker Name\tDescription\tIn\tOut\tDuration\nrun\t\t00:00:01:05\t00:00:03:02\t00:00:01:07\n"
)
SUBTITLES = "1\n00:00:01,000 --> 00:00:03,000\nrun\n"
TABULAR = (
    "Time,Media file path,Total length,FPS,Subject,Behavior,Behavioral category,Comment,Status\n"
)
BORIS = "export aggregated events as TSV"
# Names, contents, and parts of the sentences.
FOREIGN = [
    (
        "list.csv",
        "version https://git-lfs.github.com/spec/v1\noid sha256:ab\n",
        "run `git lfs pull`",
    ),
    ("a.srt", SUBTITLES, "is subtitles of one video: write a list with a row for each subtitle"),
    ("a.txt", SUBTITLES, "is subtitles of one video"),
    ("a.VTT", "", "is subtitles of one video"),
    ("a.eaf", '<?xml version="1.0"?>\n<ANNOTATION_DOCUMENT/>', "ELAN: export tab-delimited text"),
    ("a.xml", '<?xml version="1.0"?>\n<ANNOTATION_DOCUMENT/>', "is a document of ELAN"),
    ("a.TextGrid", 'File type = "ooTextFile"\n', "is a TextGrid of Praat: write a list"),
    ("a.boris", '{"behaviors_conf": {}}', f"is a project of BORIS: {BORIS}"),
    ("a.json", '{"time_format": "s", "behaviors_conf": {}}', f"is a project of BORIS: {BORIS}"),
    ("a.csv", "Observation id,obs1\nMedia file(s)\nPlayer #1,a.mp4\n", f"start and stop: {BORIS}"),
    ("a.csv", f"{TABULAR}1.0,a.mp4,10,10,,groom,,,START\n", f"start and stop: {BORIS}"),
    (
        "raw.txt",
        '"Number of header lines:";"6";\n"Video file";"a.mp4";\n',
        "raw data of EthoVision",
    ),
    ("cut.prproj", "", "is a project or markers of Premiere"),
    ("markers.csv", MARKERS, "markers of Premiere, which name no video: write a list"),
    ("a.edl", "", "is a timeline of an editor"),
    ("a.txt", "TITLE: x\nFCM: NON-DROP FRAME\n001  AX V C\n", "is a timeline of an editor"),
    ("a.opf", "", "is a document of Datavyu, ANVIL or CHAT"),
    ("via.json", '{"project": {"creator": "http://x.org/software/via"}}', "is a project of VIA"),
    ("via.csv", "# Exported using VGG Image Annotator\n", "is a project of VIA"),
    ("a.m3u8", "#EXTM3U\n#EXTINF:9,\na.ts\n", "is a playlist: write a list with one path a line"),
    ("list.csv", "<!DOCTYPE html>\n<html></html>", "is a web page, often a login or an error"),
    ("cvat.xml", "<annotations><track/></annotations>", "is XML: write a list"),
]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize(("name", "content", "sentence"), FOREIGN)
def test_files_of_other_programs_are_named_with_what_to_export(
    tmp_path: Path, name: str, content: str, sentence: str, encoding: str
) -> None:
    (tmp_path / "a.mp4").write_bytes(b"")
    (tmp_path / name).write_text(content, encoding=encoding)
    with pytest.raises(InputError) as refused:
        read_inputs(str(tmp_path / name))
    assert f"{tmp_path / name} is " in str(refused.value)
    assert sentence in str(refused.value)

"""Lists as public sets write them: heads with invented rows end in right samples, or in one sentence."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from shard_making import all_samples, make, make_folder, read_labels, video_bytes

from adamae.common.errors import InputError
from adamae.shard_tools.inputs import read_inputs, read_label_map

FILES = [
    "a.mp4",
    "b.mp4",
    "walk/c.mp4",
    "42.webm",
    "43.webm",
    "AAAAAAAAAAA.mp4",
    "BBBBBBBBBBB_000010_000020.mp4",
    "CCCCCCCCCCC_000001.mp4",
    "P01/videos/P01_01.MP4",
    "run/vidéo.mp4",
    "brush_hair/#1_x.avi",
    "brush_hair/y_(1).avi",
    "Archery/v_Archery_g01.avi",
    "Bowling/v_B.avi",
    "b c.mp4",
    "d/T [DDDDDDDDDDd].mp4",
    "d/U-DDDDDDDDDDD.webm",
    "video_test_0000001.mp4",
    "run/EEEEEEEEEEE_12_22.mp4",
]
# Folders of frames, and the number of these.
FRAMES = {"20bn/7": 5, "20bn/8": 5}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    names = list(FILES)
    for name, count in FRAMES.items():
        names += [f"{name}/{number:05d}.jpg" for number in range(1, count + 1)]
    return make_folder(tmp_path_factory.mktemp("lists"), dict.fromkeys(names, ""))


def write_list(path: Path, content: Any) -> Path:
    """Write text or bytes as they are, and anything else as JSON; return the path."""
    if not isinstance(content, (str, bytes)):
        content = json.dumps(content)
    make_folder(path.parent, {path.name: content})
    return path


AB = [("a.mp4", "run"), ("b.mp4", "walk")]
KINETICS = "label,youtube_id,time_start,time_end,split,is_cc\n"
EPIC = (
    "narration_id,participant_id,video_id,start_timestamp,stop_timestamp,start_frame,stop_frame"
    ",narration,verb,verb_class,noun,noun_class\n"
    "P01_01_0,P01,P01_01,00:00:00.14,00:00:03.37,8,202,open door,open,3,door,3\n"
)
ANNOTATION = {"label": "run", "segment": [1.5, 4]}
# Names of lists, their contents, options, and the labels that are right, by names.
HEADS: list[tuple[str, Any, dict[str, Any], list[tuple[str, Any]]]] = [
    ("VideoMAE", "a.mp4  0\nb.mp4  1\n", {}, [("a.mp4", "0"), ("b.mp4", "1")]),
    ("VideoMAEv2 pre-training", "a.mp4 0 -1\nb.mp4 0 -1\n", {}, [("a.mp4", None), ("b.mp4", None)]),
    (
        "VideoMAEv2 segments",
        "a.mp4 0 10 3\na.mp4 10 10 4\n",
        {},
        [("a.mp4#frames=0,10", "3"), ("a.mp4#frames=10,20", "4")],
    ),
    ("frames, count, label", "20bn/7 5 0\n20bn/8 5 1\n", {}, [("20bn/7", "0"), ("20bn/8", "1")]),
    (
        "frames, start, count",
        "20bn/7 0 5\n20bn/8 0 5\n",
        {},
        [("20bn/7#frames=0,5", None), ("20bn/8#frames=0,5", None)],
    ),
    (
        "VideoMAEv2, mixed",
        "a.mp4 0 -1\n20bn/7 1 5\n20bn/8 3 2\n",
        {},
        [("20bn/7#frames=0,5", None), ("20bn/8#frames=2,4", None), ("a.mp4", None)],
    ),
    (
        "Jester",
        "7;Swiping Left\n8;Thumb Up\n",
        {},
        [("20bn/7", "Swiping Left"), ("20bn/8", "Thumb Up")],
    ),
    ("Jester, test", "7\n8\n", {}, [("20bn/7", None), ("20bn/8", None)]),
    (
        "Kinetics",
        KINETICS + "run,AAAAAAAAAAA,3,13,train,0\nwalk,BBBBBBBBBBB,10,20,train,0\n",
        {},
        [("AAAAAAAAAAA.mp4#t=3,13", "run"), ("BBBBBBBBBBB_000010_000020.mp4", "walk")],
    ),
    (
        "Kinetics JSON",
        {"AAAAAAAAAAA": {"annotations": ANNOTATION, "subset": "training"}},
        {},
        [("AAAAAAAAAAA.mp4#t=1.5,4", "run")],
    ),
    (
        "ActivityNet",
        {
            "version": "1",
            "taxonomy": [],
            "database": {
                "AAAAAAAAAAA": {
                    "subset": "training",
                    "annotations": [ANNOTATION, {"label": "walk", "segment": [4, 5]}],
                }
            },
        },
        {},
        [("AAAAAAAAAAA.mp4#t=1.5,4", "run"), ("AAAAAAAAAAA.mp4#t=4,5", "walk")],
    ),
    (
        "ActivityNet Captions",
        {"AAAAAAAAAAA": {"duration": 9, "timestamps": [[0, 2]], "sentences": ["He runs."]}},
        {},
        [("AAAAAAAAAAA.mp4#t=0,2", None)],
    ),
    (
        "SSv2",
        [{"id": "42", "label": "holding a cup", "template": "Holding [something]"}],
        {},
        [("42.webm", "Holding something")],
    ),
    ("SSv2 test", [{"id": "42"}, {"id": "43"}], {}, [("42.webm", None), ("43.webm", None)]),
    (
        "SSv2 answers",
        "42;Holding a, b\n43;Moving c\n",
        {},
        [("42.webm", "Holding a, b"), ("43.webm", "Moving c")],
    ),
    (
        "HMDB51",
        "#1_x.avi 1 \ny_(1).avi 2 \n",
        {"subset": "train"},
        [("brush_hair/#1_x.avi", "brush_hair")],
    ),
    ("UCF101", "Archery/v_Archery_g01.avi 1\r\n", {}, [("Archery/v_Archery_g01.avi", "1")]),
    (
        "UCF101 test",
        "Archery/v_Archery_g01.avi\n",
        {"label_folder": 1},
        [("Archery/v_Archery_g01.avi", "Archery")],
    ),
    ("EPIC", EPIC, {"label": "verb_class"}, [("P01/videos/P01_01.MP4#t=0.14,3.37", "3")]),
    (
        "Diving48",
        [
            {"vid_name": "a", "label": 0, "start_frame": 0, "end_frame": 48},
            {"vid_name": "b", "label": 26, "start_frame": 0, "end_frame": 70},
        ],
        {},
        [("a.mp4#frames=0,48", "0"), ("b.mp4#frames=0,70", "26")],
    ),
    (
        "Charades",
        'id,script,actions,length\na,"x, y",c092 11.90 21.20;c147 0.00 12.60,24.8\nb,z,,3\n',
        {},
        [("a.mp4", ("c092", "c147")), ("b.mp4", "! it has no label, others have one")],
    ),
    (
        "Moments in Time",
        "walk/c.mp4,walk,3,0\na.mp4,run,2,1\n",
        {},
        [("a.mp4", "run"), ("walk/c.mp4", "walk")],
    ),
    (
        "HACS",
        "classname,youtube_id,subset,start,end,label\nrun,AAAAAAAAAAA,training,1,3,1\nrun,AAAAAAAAAAA,training,4,6,-1\n",
        {},
        [("AAAAAAAAAAA.mp4#t=1,3", "run")],
    ),
    (
        "VGGSound",
        'CCCCCCCCCCC,1,people marching,test\nAAAAAAAAAAA,7,"dog, barking",test\n',
        {},
        [("AAAAAAAAAAA.mp4#t=7,17", "dog, barking"), ("CCCCCCCCCCC_000001.mp4", "people marching")],
    ),
    (
        "AudioSet",
        "# made today\n# n=1\n# YTID, start_seconds, end_seconds, positive_labels\n"
        'AAAAAAAAAAA, 0.0, 10.0, "/m/1,/m/2"\n',
        {},
        [("AAAAAAAAAAA.mp4#t=0,10", ("/m/1", "/m/2"))],
    ),
    (
        "WebVid",
        "videoid,contentUrl,duration,page_dir,name\n42,https://x.org/42.mp4,PT00H00M16S,1_50,A man runs\n",
        {},
        [("42.webm", None)],
    ),
    (
        "MSR-VTT",
        {"info": {}, "videos": [{"category": 9, "video_id": "a", "start time": 7, "end time": 8}]},
        {},
        [("a.mp4", "9")],
    ),
    (
        "Hugging Face",
        'file_name,caption,label\na.mp4,"a dog, running",run\nb.mp4,"two\nlines",walk\n',
        {},
        AB,
    ),
    (
        "JSON lines",
        '{"video": "a.mp4", "class_name": "run"}\n{"video": "b.mp4", "class_name": "walk"}\n',
        {},
        AB,
    ),
    (
        "mmaction2, several labels",
        "a.mp4 0 3\nb.mp4 0 2 4\n",
        {},
        [("a.mp4", ("0", "3")), ("b.mp4", ("0", "2", "4"))],
    ),
    (
        "mmaction2, frames with offset",
        "20bn/7 2 3 127\n20bn/8 0 5 127\n",
        {},
        [("20bn/7#frames=2,5", "127"), ("20bn/8#frames=0,5", "127")],
    ),
    ("tildes", "path~label\na.mp4~run\nb.mp4~walk\n", {}, AB),
    ("URLs", "https://x.org/z.mp4,run\n", {}, [("https://x.org/z.mp4", "run")]),
    ("URL behind a brace", "{x://y/z.mp4,run\n", {}, [("{x://y/z.mp4", "run")]),
    ("TGIF", "https://x.org/1/a.mp4?x\ta dog runs\n", {"unlabeled": True}, [("a.mp4", None)]),
    (
        "URLs of one name",
        "https://x.org/1/a.mp4,run\nhttps://x.org/2/a.mp4,walk\n",
        {},
        [("https://x.org/1/a.mp4", "run"), ("https://x.org/2/a.mp4", "walk")],
    ),
    (
        "yt-dlp, youtube-dl",
        "DDDDDDDDDDd,run\nDDDDDDDDDDD,walk\n",
        {},
        [("d/T [DDDDDDDDDDd].mp4", "run"), ("d/U-DDDDDDDDDDD.webm", "walk")],
    ),
    (
        "THUMOS14",
        "video_test_0000001  1.0 3.4\n",
        {},
        [("video_test_0000001.mp4#t=1,3.4", "Diving")],
    ),
    (
        "Charades-STA",
        "a 0.0 6.9##he runs.\nb 1 2##he sits, and waits.\n",
        {},
        [("a.mp4#t=0,6.9", None), ("b.mp4#t=1,2", None)],
    ),
    (
        "YouCook2",
        {
            "database": {
                "a": {
                    "duration": 9,
                    "recipe_type": "1",
                    "annotations": [{"segment": [1, 2], "id": 0, "sentence": "cut"}],
                }
            }
        },
        {},
        [("a.mp4#t=1,2", None)],
    ),
    (
        "COIN",
        {
            "database": {
                "a": {
                    "class": "tea",
                    "start": 1,
                    "end": 9,
                    "annotation": [{"id": "b", "segment": [2, 3], "label": "boil"}],
                }
            }
        },
        {"label": "label"},
        [("a.mp4#t=2,3", "boil")],
    ),
    (
        "steps",
        [
            {
                "video": "a.mp4",
                "label": "tea",
                "start": 1,
                "end": 9,
                "steps": [{"id": 1, "label": "boil", "start": 2, "end": 3}],
            }
        ],
        {},
        [("a.mp4#t=2,3", "boil")],
    ),
    (
        "Ego4D moments",
        {
            "version": "1",
            "videos": [
                {
                    "video_uid": "a",
                    "clips": [
                        {
                            "clip_uid": "c",
                            "video_start_sec": 5,
                            "annotations": [
                                {
                                    "labels": [
                                        {
                                            "label": "run",
                                            "start_time": 1,
                                            "end_time": 2,
                                            "video_start_time": 6,
                                            "video_end_time": 7,
                                        }
                                    ]
                                }
                            ],
                        }
                    ],
                }
            ],
        },
        {},
        [("a.mp4#t=6,7", "run")],
    ),
    (
        "HD-VILA",
        '{"video_id": "a", "clip": [{"clip_id": "x", "span": ["00:00:01.0", "00:00:02.5"]}]}\n',
        {},
        [("a.mp4#t=1,2.5", None)],
    ),
    (
        "HowTo100M",
        {"a": {"start": [1, 3], "end": [2, 4], "text": ["x", "y"]}},
        {},
        [("a.mp4#t=1,2", None), ("a.mp4#t=3,4", None)],
    ),
    (
        "Panda-70M",
        "videoID,timestamp,caption,desirable_filtering\na,\"[['0:00:00.0', '0:00:03.0'], ['0:00:03', '0:00:05']]\",\"['x.', 'y.']\",\"['d', 'd']\"\n",
        {},
        [("a.mp4#t=0,3", None), ("a.mp4#t=3,5", None)],
    ),
    (
        "segments and labels in cells",
        'path,segments,labels\na.mp4,"[[0, 2], [3, 5]]","[""run"", ""walk""]"\n',
        {},
        [("a.mp4#t=0,2", "run"), ("a.mp4#t=3,5", "walk")],
    ),
    (
        "objects in cells",
        'video,annotations\na.mp4,"[{""start"": 1, ""end"": 3, ""label"": ""run""}]"\n',
        {},
        [("a.mp4#t=1,3", "run")],
    ),
    (
        "segments by path",
        {"a.mp4": [{"label": "run", "start_frame": 1, "end_frame": 30}]},
        {},
        [("a.mp4#frames=1,30", "run")],
    ),
    (
        "ranges",
        "path,segment,label\na.mp4,00:01 - 00:04,run\nb.mp4,1.5-2,walk\n",
        {},
        [("a.mp4#t=1,4", "run"), ("b.mp4#t=1.5,2", "walk")],
    ),
    (
        "several numbers",
        'path,label\na.mp4,"0,2,4"\nb.mp4,3\n',
        {},
        [("a.mp4", ("0", "2", "4")), ("b.mp4", "3")],
    ),
    (
        "several names",
        "path,label\na.mp4,run;walk\nb.mp4,walk\n",
        {},
        [("a.mp4", ("run", "walk")), ("b.mp4", "walk")],
    ),
    (
        "known names",
        'path,label\na.mp4,"run, walk"\nb.mp4,walk\n42,run\n',
        {},
        [("42.webm", "run"), ("a.mp4", ("run", "walk")), ("b.mp4", "walk")],
    ),
    (
        "names with commas",
        'path,label\na.mp4,"dog, barking"\nb.mp4,walk\n',
        {},
        [("a.mp4", "dog, barking"), ("b.mp4", "walk")],
    ),
    ("UTF-32", "path\tlabel\na.mp4\trun\nb.mp4\twalk\n".encode("utf-32"), {}, AB),
    ("UTF-16 without a mark", "path\tlabel\na.mp4\trun\nb.mp4\twalk\n".encode("utf-16-le"), {}, AB),
    ("numbers of rows", "0,a.mp4,run\n1,b.mp4,walk\n2,42,run\n", {}, [("42.webm", "run"), *AB]),
    (
        "numbers of rows, paths",
        "1 a.mp4\n2 b.mp4\n3 42\n",
        {},
        [("42.webm", None), ("a.mp4", None), ("b.mp4", None)],
    ),
    ("TVR", '{"vid_name": "a", "ts": [1.5, 4], "desc": "x"}\n', {}, [("a.mp4#t=1.5,4", None)]),
    (
        "--label",
        "a.mp4\nb.mp4\n",
        {"unlabeled": True, "constant_label": "run"},
        [("a.mp4", "run"), ("b.mp4", "run")],
    ),
    ("one video", '{"file_name": "a.mp4", "label": "run"}\n', {}, [("a.mp4", "run")]),
    ("somebody's folders", "/home/x/k400/walk/c.mp4 5\n", {}, [("walk/c.mp4", "5")]),
    ("label and its id", "path,label_id,label\na.mp4,0,run\nb.mp4,1,walk\n", {}, AB),
    ("semicolons", "\ufeffpath;label\r\na.mp4;run\r\nb.mp4;walk\r\n", {}, AB),
    ("pandas", ",0,1\n0,a.mp4,run\n1,b.mp4,walk\n", {}, AB),
    ("label first", "run,a.mp4\nwalk,b.mp4\n", {}, AB),
    (
        "Latin-1",
        "path,label\nrun/vidéo.mp4,été\n".encode("latin-1"),
        {},
        [("run/vidéo.mp4", "été")],
    ),
    ("UTF-16", "path\tlabel\na.mp4\trun\nb.mp4\twalk\n".encode("utf-16"), {}, AB),
    ("NFD", "path,label\nrun/vide\u0301o.mp4,run\n", {}, [("run/vidéo.mp4", "run")]),
    ("backslashes", "path,label\nwalk\\c.mp4,walk\n", {}, [("walk/c.mp4", "walk")]),
    ("quotes", '"a.mp4","run"\n"b.mp4","walk"\n', {}, AB),
    ("tabs", "a.mp4\trun\n\nb.mp4\twalk\n", {}, AB),
    ("rows are numbered", "id,path,label\n0,a.mp4,run\n1,b.mp4,walk\n", {}, AB),
    ("no extensions", "walk/c,walk\na,run\n", {}, [("a.mp4", "run"), ("walk/c.mp4", "walk")]),
    (
        "JSON with null",
        [{"path": "a.mp4", "label": None, "class": "run"}, {"path": "b.mp4", "class": "walk"}],
        {},
        AB,
    ),
    ("spaces in paths", "a.mp4\nb c.mp4\n", {}, [("a.mp4", None), ("b c.mp4", None)]),
    ("spaces in paths, labels", "a.mp4 3\nb c.mp4 4\n", {}, [("a.mp4", "3"), ("b c.mp4", "4")]),
    (
        "bad segments",
        "path,start,end,label\na.mp4,-1,3,run\na.mp4,5,2,run\na.mp4,x,2,run\na.mp4,00:01.5,0:0:3,run\n",
        {},
        [
            ("a.mp4", "! its segment from 'x' to '2' is no time"),
            ("a.mp4#t=-1,3", "! its segment starts at -1, which no video has"),
            ("a.mp4#t=1.5,3", "run"),
            ("a.mp4#t=5,2", "! its segment ends at 2, not after its start at 5"),
        ],
    ),
    (
        "trimmed files",
        "path,start,end,label\nBBBBBBBBBBB_000010_000020.mp4,10.0,20.0,run\nEEEEEEEEEEE,12.0,22.0,run\nCCCCCCCCCCC_000001.mp4,1,1.2,a\n",
        {},
        [
            ("BBBBBBBBBBB_000010_000020.mp4", "run"),
            ("CCCCCCCCCCC_000001.mp4#t=1,1.2", "a"),
            ("run/EEEEEEEEEEE_12_22.mp4", "run"),
        ],
    ),
    (
        "trimmed file by its name",
        "path,start,end,label\nrun/EEEEEEEEEEE_12_22.mp4,12,22,run\n",
        {},
        [("run/EEEEEEEEEEE_12_22.mp4", "run")],
    ),
    (
        "--start-column",
        "a.mp4,0.0,3.0,run\nb.mp4,1.0,2.0,walk\n",
        {"start": "2", "end": "3"},
        [("a.mp4#t=0,3", "run"), ("b.mp4#t=1,2", "walk")],
    ),
    (
        "--start-column none",
        "path,start,end,label\na.mp4,12,22,run\n",
        {"start": "none"},
        [("a.mp4", "run")],
    ),
    ("--suffix", "x,y\na,run\nb,walk\n", {"suffix": ".mp4", "path": "x", "label": "y"}, AB),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"), HEADS, ids=[head[0] for head in HEADS]
)
def test_heads_of_public_lists(
    folder: Path, name: str, content: Any, options: dict[str, Any], expected: Any
) -> None:
    # The names of these lists hold the labels.
    names = {"HMDB51": "brush_hair_test_split1.txt", "THUMOS14": "Diving_test.txt"}
    path = write_list(folder / names.get(name, "list"), content)
    assert list(read_labels(path, **options).items()) == expected


# Contents of lists, and the sentences that refuse them.
REFUSED: list[tuple[Any, str]] = [
    (
        "path,class,category\na.mp4,run,sport\nb.mp4,walk,sport\n",
        "class, category may each be the label; its columns are path",
    ),
    (EPIC, "verb, noun may each be the label"),
    ("video,Klasse\na.mp4,run\nb.mp4,walk\n", "no column is known as the label .* Klasse may be"),
    ("foo,bar\nx,y\nz,w\n", "there is no such file|no column names videos"),
    ("a.mp4 1 run\nb.mp4 2 3\n", "is not clear|is a number in"),
    ("a.mp4,0\nb.mp4,run\n", "is a number in 1 rows .* and a name in 1"),
    ("a.mp4,0.0,3.0,run\nb.mp4,1.0,2.0,walk\n", "may be the start and the end"),
    ("AAAAAAAAAAA,0902,0.077,0.151,0.283,0.811,80,1\n", "boxes of persons"),
    (
        "AAAAAAAAAAA,0904,0.217,0.008,0.982,0.966,12\nAAAAAAAAAAA,0905,0.2,0.1,0.9,0.9,9\n",
        "boxes of persons",
    ),
    ("AAAAAAAAAAA,0902,0.326,0.185,0.470,0.887,80,0.996382\n", "boxes of persons"),
    ("video_id,x1,y1,x2,y2,label\na,1,2,3,4,run\n", "it has boxes; its columns are video_id"),
    (
        "path,label,split\na.mp4,run,train\nb.mp4,walk,val\n",
        r"several subsets, train \(1\), val \(1\): give --subset",
    ),
    ("path,start,label\na.mp4,1,run\n", "start has no end"),
    ("20bn/7 5 1\n20bn/8 5 3 5\n", "several labels behind the number of frames"),
    ("path,label\na.mp4,0.25\nb.mp4,0.5\n", "label holds fractions, not classes"),
    (
        "".join(f"{name},a man does thing number {n}\n" for n, name in enumerate(FILES[:6])),
        "look like captions",
    ),
    (
        [{"filename": "a.mp4", "label": {"concept": [250], "action": [180]}}],
        "label holds objects, not labels",
    ),
    ('path,label\na.mp4,"run\nb.mp4,walk\n', "line 2, cannot be split at commas"),
    (
        "path,label\n" + "".join(f"a.mp4,a man number {n} runs\n" for n in range(30)),
        "look like captions, not classes",
    ),
    (
        {"a": {"E_1": {"event": 4, "segments": {"A_1": {"timestamps": [[1, 2]]}}}}},
        "E_1 holds segments in a form .*--start-column none",
    ),
    (
        'path,relevant_windows,label\na.mp4,"[[0, 2], [3, 5]]",run\n',
        "relevant_windows holds segments",
    ),
    (
        [{"video": "a.mp4", "start": 1, "end": 9, "words": [{"start": 1, "end": 2}]}],
        "words holds segments",
    ),
    ([{"id": "a", "segments": [{"s": 1, "e": 3}]}], "segments holds segments"),
    (
        [{"video": "a.mp4", "times": [[1, 1], [2, 2]], "num_segments": 6}],
        "its times count pieces of 5 seconds",
    ),
    (
        [{"video": "a.mp4", "start": 1, "end": 9, "clip_start": 2, "clip_end": 3}],
        "start, clip_start may each be the start",
    ),
    (
        {"videos": [{"id": 1}], "annotations": [{"id": 2}]},
        r"holds several lists \(videos, annotations\)",
    ),
    ("a.mp4 16 24\nb.mp4 1 4 30 60\n", "column 2 may be starts and ends of segments"),
    (
        "a.mp4 Abuse 16 24 -1 -1\nb.mp4 Normal -1 -1 -1 -1\n",
        "has no header, and which of column 2, .* is not clear",
    ),
    ('path,label\na.mp4,"[0, 1, 0]"\nb.mp4,"[1, 0, 0]"\n', "label holds a 0 or a 1 per class"),
    ("path,label\na.mp4,[0 2]\nb.mp4,[3]\n", "label holds lists that cannot be read"),
    ("path,label\na.mp4,Run\nb.mp4,run\n", "the labels Run and run differ in case"),
    ("path,label\na.mp4,01\nb.mp4,02\n42,2\n", "is a number in 1 rows .* and a name in 2"),
    ("path,label\n", "has no rows but its header|is no such file"),
    (
        "id,path,label\n0 a.mp4 run\n1\tb.mp4\twalk\n",
        "which of column 1, column 3 is the label is not clear",
    ),
    ("", "is empty"),
    (b"PK\x03\x04rest", "is compressed .zip."),
    (bytes(range(32)) * 9, "is binary"),
]


@pytest.mark.parametrize(("content", "sentence"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_not_clear_is_refused_in_a_sentence(
    folder: Path, content: Any, sentence: str, tmp_path: Path
) -> None:
    with pytest.raises(InputError, match=sentence) as refused:
        make(write_list(folder / "list.csv", content), tmp_path / "out")
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


def test_a_dry_run_says_how_a_list_is_read_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "list.csv").write_text("a.mp4 0\nb.mp4 1\na.mp4 0\n")
    assert make(folder / "list.csv", tmp_path / "out", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "3 rows in" in output
    how = "path = column 1, label = column 2, format: paths and labels; below"
    assert f"(UTF-8, spaces, no header): {how}" in output
    found = "2 videos of 2 files, 2 classes (0, 1), 1 rows repeat another and are left out"
    assert f"{found}, 0 that cannot" in output
    assert not (tmp_path / "out").exists()


# Label maps, and the number of their first class, if they number them.
MAPS = {
    "1 Archery\r\n2 Bowling\r\n": 1,
    "Archery,0\nBowling,1\n": 0,
    "id,name\n0,Archery\n1,Bowling\n": 0,
    '{"Archery": "0", "Bowling": "1"}': 0,
    '["Archery", "Bowling"]': None,
    "Archery\nBowling\n": None,
    '[{"id": 0, "name": "Archery"}, {"id": 1, "name": "Bowling"}]': 0,
    "A01 Archery\nB01 Bowling": None,
}


@pytest.mark.parametrize("text", MAPS)
def test_label_maps_name_numbers_from_0_or_1_whatever_they_count_from(
    folder: Path, text: str
) -> None:
    path = folder / ("map.json" if text.startswith(("[", "{")) else "map.txt")
    path.write_text(text)
    label_map = read_label_map(path)
    assert (label_map.names, label_map.first) == (["Archery", "Bowling"], MAPS[text])
    pairs = [("0", "1"), ("1", "2"), ("archery", "Bowling")]
    if label_map.codes:
        pairs.append(("A01", "B01"))
    for archery, bowling in pairs:
        rows = f"Archery/v_Archery_g01.avi {archery}\nBowling/v_B.avi {bowling}\n"
        (folder / "list").write_text(rows)
        inputs = read_inputs(str(folder / "list"))
        inputs.apply_label_map(label_map)
        assert [item.label for item in inputs] == ["Archery", "Bowling"]
    (folder / "list").write_text("Bowling/v_B.avi 1\n")
    if MAPS[text] is None:
        with pytest.raises(InputError, match="count from 0 or from 1"):
            read_inputs(str(folder / "list")).apply_label_map(label_map)


def test_episodes_of_lerobot_are_samples(tmp_path: Path) -> None:
    """Version 3 has several in a file, version 2 a file each."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    version_2 = tmp_path / "2"
    version_3 = tmp_path / "3"
    info: dict[str, Any] = {
        "codebase_version": "v3.0",
        "chunks_size": 1000,
        "features": {"top": {"dtype": "video"}, "state": {"dtype": "int64"}},
        "video_path": "videos/{video_key}/chunk-{chunk_index:03d}/file-{file_index:03d}.mp4",
    }
    video = "videos/top/chunk-000/file-001.mp4"
    make_folder(version_3, {"meta/info.json": json.dumps(info), video: ""})
    episode = {
        "episode_index": 1,
        "tasks": ["drop", "put"],
        "length": 20,
        "videos/top/from_timestamp": 3.0,
        "videos/top/to_timestamp": 5.0,
        "videos/top/chunk_index": 0,
        "videos/top/file_index": 1,
    }
    table = version_3 / "meta/episodes/chunk-000/file-000.parquet"
    table.parent.mkdir(parents=True)
    parquet.write_table(pyarrow.Table.from_pylist([episode]), table)
    (item,) = read_inputs(str(version_3))
    assert item.name == f"{video}#t=3,5"
    fields = {"episode": 1, "camera": "top", "tasks": ["drop", "put"], "length": 20}
    assert json.loads(item.fields) == fields

    folder = "videos/chunk-{episode_chunk:03d}/{video_key}"
    info["video_path"] = folder + "/episode_{episode_index:06d}.mp4"
    video = "videos/chunk-001/top/episode_001001.mp4"
    episodes = '{"episode_index": 1001, "tasks": ["pick"]}\n'
    files = {"meta/info.json": json.dumps(info), "meta/episodes.jsonl": episodes, video: ""}
    make_folder(version_2, files)
    assert [item.name for item in read_inputs(str(version_2))] == [video]
    assert len(read_inputs(str(tmp_path))) == 2, "a folder of data sets"
    (version_2 / "meta/episodes.jsonl").unlink()
    sentence = r"its tables in meta/ cannot be read .*: give the folder videos/ in it"
    with pytest.raises(InputError, match=sentence):
        read_inputs(str(version_2))


def test_parquet_holds_paths_or_videos(
    tmp_path: Path, generate: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    features = {
        "label": {"names": ["run", "walk"], "_type": "ClassLabel"},
        "image": {"_type": "Image"},
    }
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}

    def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        table = pyarrow.table(columns).replace_schema_metadata(metadata)
        parquet.write_table(table, path, **options)
        return path

    videos = [generate("--num-frames", "4", "--seed", str(seed)).read_bytes() for seed in (1, 2, 3)]
    cells = [
        {"bytes": videos[0], "path": None},
        {"bytes": videos[1], "path": "videos/a.mp4"},
        {"bytes": videos[2], "path": "videos/a.mp4"},
    ]
    image = [{"bytes": b"x", "path": "c"}] * 3
    table = {"image": image, "video": cells, "label": [1, 0, 1], "times": [[1, 2, 3, 4, 5]] * 3}
    train = "train-00000-of-00001.parquet"
    inputs = tmp_path / "in"
    write(inputs / "data" / train, table, row_group_size=2)
    write(inputs / "data/test-00000-of-00001.parquet", {"video": cells, "label": [1, 1, 1]})
    with pytest.raises(InputError, match="has several subsets, test, train: give --subset"):
        read_inputs(str(inputs))
    expected = {
        f"{train}/000000-video.mp4": "walk",
        f"{train}/000001-a.mp4": "run",
        f"{train}/000002-a.mp4": "walk",
    }
    assert read_labels(inputs, subset="train") == expected
    out = tmp_path / "out"
    assert make(inputs, out, "--encode", "copy", "--subset", "train") == 0
    stored = {sample.source: video_bytes(out, shard, sample) for shard, sample in all_samples(out)}
    assert stored == dict(zip(expected, videos, strict=True))

    path = tmp_path / "list"
    assert len(read_labels(write(path, {"mp4": videos}))) == 3
    write(path, {"video": cells, "mp4": videos})
    sentence = r"video, mp4 may each be the video; .*: give --path-column"
    with pytest.raises(InputError, match=sentence):
        read_inputs(str(path))

    make_folder(tmp_path, {"a.mp4": "", "b.mp4": ""})
    paths = [{"bytes": None, "path": "a.mp4"}, {"bytes": None, "path": "b.mp4"}]
    column = pyarrow.array(paths, pyarrow.array(cells).type)
    write(path, {"video": column, "label": [1, -1]})
    labels = {"a.mp4": "walk", "b.mp4": "! it has no label, others have one"}
    assert read_labels(path) == labels, "-1 is no class"
    write(path, {"file_name": ["a.mp4", "b.mp4"], "class": ["run", "walk"], "image": image[:2]})
    assert read_labels(path) == dict(AB)
    write(path, {"image": image})
    sentence = r"\(Parquet without the bytes of image\): no column names videos"
    with pytest.raises(InputError, match=sentence):
        read_inputs(str(path))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match="is Parquet, which needs pyarrow: pip install pyarrow"):
        read_inputs(str(path))


def test_a_folder_is_listed_where_its_files_are_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {f"{number % 3}/{number}.mp4": "" for number in range(300)} | {"3/a.mp4/00001.jpg": ""}
    make_folder(tmp_path, files)
    (tmp_path / "3" / "gone.mp4").symlink_to(tmp_path / "nowhere")
    missing = dict.fromkeys(("0/none.mp4", "4/none.mp4"), "there is no such file")
    missing["3/gone.mp4"] = "it is a link to a file that does not exist"
    rows = "".join(f"{name.removesuffix('/00001.jpg')},x\n" for name in [*files, *missing])
    (tmp_path / "list.csv").write_text(f"path,label\n{rows}")
    asked_paths = []
    stat = os.stat

    def count(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        asked_paths.append(str(path))
        return stat(path, *arguments, **options)

    monkeypatch.setattr(os, "stat", count)
    problems = {item.source: item.problem for item in read_inputs(str(tmp_path / "list.csv"))}
    assert len([path for path in asked_paths if path.endswith(".mp4")]) < 50
    assert {name: problem for name, problem in problems.items() if problem} == missing

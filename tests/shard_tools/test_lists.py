"""Lists as public sets write them: heads with invented rows end in right samples, or in one sentence."""

import json
import os
import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
from shard_making import all_samples, make, make_folder, read_labels, video_bytes

from adamae.common.errors import InputError, QuestionError
from adamae.shard_tools.inputs import ListOptions, read_inputs, read_label_map

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


def list_proposals(inputs: Path, **options: Any) -> list[str]:
    """Return the values of --columns that the question about a list proposes."""
    with pytest.raises(QuestionError) as question:
        read_inputs(str(inputs), ListOptions(takes_columns=True, **options))
    commands = [shlex.split(line) for line in question.value.details if "--columns" in line]
    return [words[words.index("--columns") + 1] for words in commands]


AB = [("a.mp4", "run"), ("b.mp4", "walk")]
KINETICS = "label,youtube_id,time_start,time_end,split,is_cc\n"
EPIC = (
    "narration_id,participant_id,video_id,start_timestamp,stop_timestamp,start_frame,stop_frame"
    ",narration,verb,verb_class,noun,noun_class\n"
    "P01_01_0,P01,P01_01,00:00:00.14,00:00:03.37,8,202,open door,open,3,door,3\n"
)
ANNOTATION = {"label": "run", "segment": [1.5, 4]}
# Names of lists, their contents, options, and the labels that are right, by names. A list is taken
# without a question unless there is `columns`, which the question proposes first.
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
    (
        "EPIC",
        EPIC,
        {
            "columns": "path=video_id,start=start_timestamp,end=stop_timestamp,group=participant_id,caption=narration,label=verb,rest=fields"
        },
        [("P01/videos/P01_01.MP4#t=0.14,3.37", "open")],
    ),
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
        {"columns": "path=video,label=class_name"},
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
    (
        "-1 for no label",
        "a.mp4 0\nb.mp4 -1\n42 1\n",
        {},
        [("42.webm", "1"), ("a.mp4", "0"), ("b.mp4", "! it has no label, others have one")],
    ),
    (
        "How2Sign",
        "VIDEO_ID\tVIDEO_NAME\tSENTENCE_ID\tSENTENCE_NAME\tSTART_REALIGNED\tEND_REALIGNED\tSENTENCE\n"
        "x\ta\tx_1\tx_1-rgb\t0.5\t2.5\tHello.\n",
        {},
        [("a.mp4#t=0.5,2.5", None)],
    ),
    (
        "WLASL",
        [
            {
                "gloss": "book",
                "instances": [
                    {"bbox": [3, 3, 8, 7], "split": split, "video_id": name, "signer_id": 1}
                    | {"frame_start": 1, "frame_end": -1, "url": "http://x.org/x"}
                    for name, split in (("42", "train"), ("43", "val"))
                ],
            }
        ],
        {"subset": "train"},
        [("42.webm", "book")],
    ),
    (
        "PHOENIX-2014-T",
        "name|video|start|end|speaker|orth|translation\n7|7/1/*.png|-1|-1|Ann|JETZT|und nun\n",
        {},
        [("20bn/7", None)],
    ),
    (
        "Drive&Act",
        "participant_id,file_id,annotation_id,frame_start,frame_end,activity,chunk_id\n"
        "1,walk/c,0,10,40,closing_door,0\n",
        {},
        [("walk/c.mp4#frames=10,40", "closing_door")],
    ),
    (
        "EchoNet",
        "FileName,EF,FPS,Split\na,55.4,50,TRAIN\nb,5.5,50,VAL\n",
        {"subset": "train"},
        [("a.mp4", None)],
    ),
    (
        "DFDC",
        {
            "a.mp4": {"label": "FAKE", "split": "train", "original": "b.mp4"},
            "b.mp4": {"label": "REAL", "split": "train"},
        },
        {},
        [("a.mp4", "FAKE"), ("b.mp4", "REAL")],
    ),
    (
        "OpenVid",
        "video,caption,motion score,fps\na.mp4,A man runs.,1.2,25\n",
        {},
        [("a.mp4", None)],
    ),
    (
        "InternVid",
        '{"YoutubeID": "a", "Start_timestamp": "00:00:01.5", "End_timestamp": "00:00:03", "Caption": "x"}\n',
        {},
        [("a.mp4#t=1.5,3", None)],
    ),
    (
        "EgoClip",
        "video_uid\tclip_start\tclip_end\tclip_text\ttag_verb\na\t1.0\t2.25\t#C drops\t[93]\n",
        {},
        [("a.mp4#t=1,2.25", None)],
    ),
    (
        "VGGSound, trimmed alone",
        "CCCCCCCCCCC,1,people marching,test\n",
        {},
        [("CCCCCCCCCCC_000001.mp4", "people marching")],
    ),
    (
        "-1 and -1 for the whole video",
        "path,start,end,label\na.mp4,-1,-1,run\nb.mp4,1,2,walk\n",
        {},
        [("a.mp4", "run"), ("b.mp4#t=1,2", "walk")],
    ),
    ("sep=", "sep=;\npath;label\na.mp4;run\nb.mp4;walk\n", {}, AB),
    ("empty last columns", "path\tlabel\tcaption\na.mp4\trun\t\nb.mp4\twalk\t\n", {}, AB),
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
        {"columns": "path=key,label=annotation.label,segment=annotation.segment,rest=fields"},
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
        {"columns": "path=video,start=steps.start,end=steps.end,label=steps.label,rest=fields"},
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
        {"columns": "path=path,segment=segments,label=labels"},
        [("a.mp4#t=0,2", "run"), ("a.mp4#t=3,5", "walk")],
    ),
    (
        "objects in cells",
        'video,annotations\na.mp4,"[{""start"": 1, ""end"": 3, ""label"": ""run""}]"\n',
        {
            "columns": "path=video,start=annotations.start,end=annotations.end,label=annotations.label"
        },
        [("a.mp4#t=1,3", "run")],
    ),
    (
        "segments by path",
        {"a.mp4": [{"label": "run", "start_frame": 1, "end_frame": 30}]},
        {
            "columns": "path=key,start=value.start_frame:frames,end=value.end_frame:frames,label=value.label"
        },
        [("a.mp4#frames=1,30", "run")],
    ),
    (
        "ranges",
        "path,segment,label\na.mp4,00:01 - 00:04,run\nb.mp4,1.5-2,walk\n",
        {"columns": "path=path,segment=segment,label=label"},
        [("a.mp4#t=1,4", "run"), ("b.mp4#t=1.5,2", "walk")],
    ),
    (
        "several numbers",
        'path,label\na.mp4,"0,2,4"\nb.mp4,3\n',
        {"columns": "path=path,label=label:commas"},
        [("a.mp4", ("0", "2", "4")), ("b.mp4", "3")],
    ),
    (
        "several names",
        "path,label\na.mp4,run;walk\nb.mp4,walk\n",
        {"columns": "path=path,label=label:semicolons"},
        [("a.mp4", ("run", "walk")), ("b.mp4", "walk")],
    ),
    (
        "known names",
        'path,label\na.mp4,"run, walk"\nb.mp4,walk\n42,run\n',
        {"columns": "path=path,label=label:commas"},
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
    (
        "numbers of rows",
        "0,a.mp4,run\n1,b.mp4,walk\n2,42,run\n",
        {"columns": "path=2,label=3,rest=fields"},
        [("42.webm", "run"), *AB],
    ),
    (
        "numbers of rows, paths",
        "1 a.mp4\n2 b.mp4\n3 42\n",
        {"columns": "path=2,rest=fields"},
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
    (
        "label and its id",
        "path,label_id,label\na.mp4,0,run\nb.mp4,1,walk\n",
        {"columns": "path=path,label=label,rest=fields"},
        AB,
    ),
    ("semicolons", "\ufeffpath;label\r\na.mp4;run\r\nb.mp4;walk\r\n", {}, AB),
    ("pandas", ",0,1\n0,a.mp4,run\n1,b.mp4,walk\n", {}, AB),
    ("label first", "run,a.mp4\nwalk,b.mp4\n", {"columns": "path=2,label=1"}, AB),
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
    ("empty columns", "path\tlabel\t\t\na.mp4\trun\t\t\nb.mp4\twalk\t\t\n", {}, AB),
    (
        "signed URLs",
        "https://host.invalid/b%20c.mp4?sign=a%2Fb run\nhttps://host.invalid/a.mp4?sign=c walk\n",
        {},
        [("a.mp4", "walk"), ("b c.mp4", "run")],
    ),
    (
        "URLs and labels",
        "https://host.invalid/e.mp4 run\nhttps://host.invalid/f.mp4 walk\n",
        {},
        [("https://host.invalid/e.mp4", "run"), ("https://host.invalid/f.mp4", "walk")],
    ),
    ("tabs", "a.mp4\trun\n\nb.mp4\twalk\n", {}, AB),
    (
        "rows are numbered",
        "id,path,label\n0,a.mp4,run\n1,b.mp4,walk\n",
        {"columns": "path=path,label=label,rest=fields"},
        AB,
    ),
    ("no extensions", "walk/c,walk\na,run\n", {}, [("a.mp4", "run"), ("walk/c.mp4", "walk")]),
    (
        "JSON with null",
        [{"path": "a.mp4", "label": None, "class": "run"}, {"path": "b.mp4", "class": "walk"}],
        {"columns": "path=path,label=class,rest=fields"},
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
        "trimmed files alone",
        "path,start,end,label\nBBBBBBBBBBB,10,20,run\nEEEEEEEEEEE,12,22,walk\n",
        {},
        [("BBBBBBBBBBB_000010_000020.mp4", "run"), ("run/EEEEEEEEEEE_12_22.mp4", "walk")],
    ),
    (
        "seconds without a header",
        "a.mp4,0.0,3.0,run\nb.mp4,1.0,2.0,walk\n",
        {"columns": "path=1,start=2,end=3,label=4"},
        [("a.mp4#t=0,3", "run"), ("b.mp4#t=1,2", "walk")],
    ),
    ("--suffix", "x,y\na,run\nb,walk\n", {"suffix": ".mp4", "columns": "path=x,label=y"}, AB),
]


@pytest.mark.parametrize(
    ("name", "content", "options", "expected"), HEADS, ids=[head[0] for head in HEADS]
)
def test_heads_of_public_lists(
    folder: Path, name: str, content: Any, options: dict[str, Any], expected: Any
) -> None:
    """Published formats are taken; of other lists, the first command that is proposed is right."""
    # The names of these lists hold the labels.
    names = {"HMDB51": "brush_hair_test_split1.txt", "THUMOS14": "Diving_test.txt"}
    path = write_list(folder / names.get(name, "list"), content)
    options = dict(options)
    columns = options.pop("columns", None)
    if columns is None:
        assert list(read_labels(path, **options).items()) == expected
        return
    assert list_proposals(path, **options)[0] == columns
    assert list(read_labels(path, columns=columns, **options).items()) == expected


# Contents of lists, and the sentences that refuse them.
REFUSED: list[tuple[Any, str]] = [
    ("foo,bar\nx,y\nz,w\n", r"names no video .*first row: foo, bar\): give --root or --suffix"),
    ("a.mp4,0\nb.mp4,run\n", "is a number in 1 row .* and a name in 1"),
    ("AAAAAAAAAAA,0902,0.077,0.151,0.283,0.811,80,1\n", "boxes of persons"),
    (
        "AAAAAAAAAAA,0904,0.217,0.008,0.982,0.966,12\nAAAAAAAAAAA,0905,0.2,0.1,0.9,0.9,9\n",
        "boxes of persons",
    ),
    ("AAAAAAAAAAA,0902,0.326,0.185,0.470,0.887,80,0.996382\n", "boxes of persons"),
    (
        "path,label,split\na.mp4,run,train\nb.mp4,walk,val\n",
        r"several subsets, train \(1\), val \(1\): give --subset",
    ),
    ('path,label\na.mp4,"run\nb.mp4,walk\n', "line 2, cannot be split at commas"),
    (
        [{"video": "a.mp4", "times": [[1, 1], [2, 2]], "num_segments": 6}],
        "its times count pieces of 5 seconds",
    ),
    (
        {"videos": [{"id": 1, "fps": 9}], "annotations": [{"id": 2, "label": "run"}]},
        r"holds several lists \(videos, annotations\)",
    ),
    (
        {"annotations": [{"gameTime": "1 - 00:05", "label": "Kick-off", "position": "5041"}]},
        "names no video",
    ),
    ("10 30 G1\n31 60 G5\n", "names no video"),
    ("path,label\na.mp4,Run\nb.mp4,run\n", "the labels Run and run differ in case"),
    ("path,label\na.mp4,01\nb.mp4,02\n42,2\n", "is a number in 1 row .* and a name in 2"),
    ("path,label\n", "has no rows but its header"),
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
    assert not isinstance(refused.value, QuestionError)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "out").exists()


TAB_TIMES = "a.mp4\tx\t{}\t{}\trun\nb.mp4\tx\t{}\t{}\twalk\n"
RANGES = [{"ranges": [{"start": 2, "end": 4}], "timelinelabels": ["run"]}]
MESSAGES = [{"role": "user", "content": "What?"}]
SPLITS_OF_ROWS = "path,label,{}\na.mp4,run,train\nb.mp4,walk,test\n"
HASHES = "".join(f"a.mp4 {number:032x}\n" for number in range(100))
QUERY = {"start_sec": 1, "end_sec": 2.5, "query": "Where is it?", "tags": []}
SPANS = "several rows name the same whole video and differ"
# Contents of lists that are shown, the value of --columns that is proposed first, and a sentence.
SHOWN: list[tuple[str, Any, str, str]] = [
    ("a name", "video,Klasse\na.mp4,run\nb.mp4,walk\n", "path=video,label=Klasse", ""),
    (
        "two labels",
        "path,class,category\na.mp4,run,sport\nb.mp4,walk,sport\n",
        "path=path,label=class,rest=fields",
        "label=category",
    ),
    (
        "no votes",
        "a.mp4,run,3,10\nb.mp4,walk,4,9\n",
        "path=1,start=3:frames,end=4:frames,label=2",
        "start=3:frames,length=4:frames,label=2",
    ),
    ("a number", "a.mp4 1 run\nb.mp4 2 walk\n", "path=1,label=3,rest=fields", ""),
    (
        "boxes",
        "video_id,x1,y1,x2,y2,label\na,1,2,3,4,run\n",
        "path=video_id,label=label,rest=fields",
        "x1 holds boxes",
    ),
    (
        "no end",
        "path,start,label\na.mp4,1,run\n",
        "path=path,rest=fields",
        "start has no end",
    ),
    (
        "pairs",
        "path,label\na.mp4,b.mp4\nb.mp4,42.webm\n",
        "path=path,rest=fields",
        "label names files",
    ),
    ("pairs of ids", [["a", "b"], ["b", "42"]], "path=1,rest=fields", "column 2 names files, too"),
    (
        "IKEA ASM",
        {"x": {"a": {"annotation": [{"segment": [0, 12], "label": "spin"}], "subset": "train"}}},
        "path=key,segment=annotation.segment,label=annotation.label,split=subset",
        "segment .seconds",
    ),
    (
        "a class and its times",
        [{"path": "a.mp4", "label": ["run", 1.0, 3.0]}],
        "path=path,rest=fields",
        "label holds names and numbers",
    ),
    ("hashes", HASHES, "path=1,rest=ignored", "column 2 is different in each row"),
    (
        "commas",
        'path,label\na.mp4,"2,68"\nb.mp4,11\n',
        "path=path,rest=fields",
        "if :commas is added",
    ),
    ("two videos", "a.mp4 b.mp4 12\nb.mp4 42.webm 13\n", "path=1,rest=fields", ""),
    (
        "counts and labels of files",
        "a.mp4 100 0\nb.mp4 90 1\n",
        "path=1,label=3,rest=fields",
        "column 2 +kept",
    ),
    ("labels in columns", "a.mp4,12,45\nb.mp4,3\n", "path=1,rest=fields", ""),
    (
        "TACoS",
        {"a": {"timestamps": [[10, 40]], "sentences": ["She cuts."], "fps": 29.4}},
        "path=key,segment=timestamps,caption=sentences,rest=fields",
        "timestamps may count frames or milliseconds",
    ),
    (
        "FineAction",
        {"a": {"annotations": [{"label": "run", "segment_frames": [1, 3], "segment": [0.1, 0.3]}]}},
        "path=key,segment=annotations.segment,label=annotations.label,rest=fields",
        "",
    ),
    (
        "Ego4D's questions",
        [{"video_uid": "a", "clips": [{"start_sec": 0, "end_sec": 9, "queries": [QUERY]}]}],
        "path=video_uid,start=clips.queries.start_sec,end=clips.queries.end_sec"
        ",caption=clips.queries.query,rest=fields",
        "",
    ),
    (
        "rows without the label",
        "video,verb,noun\na.mp4,run,\nb.mp4,,dog\n42.webm,walk,cat\n",
        "path=video,label=verb,rest=fields",
        "1 of the rows cannot be used: it has no label",
    ),
    ("tuples", "path,label\na.mp4,\"[('run', 1)]\"\n", "path=path,rest=fields", "lists of lists"),
    ("frames, labels", "20bn/7 5 1\n20bn/8 5 3 5\n", "path=1,label=2:spaces", "several labels"),
    ("fractions", "path,label\na.mp4,0.25\nb.mp4,0.5\n", "path=path,rest=fields", "fractions"),
    (
        "captions",
        "".join(f"{name},a man does thing number {n}\n" for n, name in enumerate(FILES[:6])),
        "path=1,caption=2",
        "label=2",
    ),
    (
        "captions of one video",
        "path,label,caption\na.mp4,run,x\na.mp4,run,y\nb.mp4,walk,z\n",
        "path=path,label=label,rest=ignored",
        SPANS,
    ),
    (
        "objects",
        [{"filename": "a.mp4", "label": {"concept": [250], "action": [180]}}],
        "path=filename,label=label.concept,rest=fields",
        "label=label.action",
    ),
    (
        "FineGym",
        {"a": {"E_1": {"event": 4, "segments": {"A_1": {"timestamps": [[1, 2]]}}}}},
        "path=key,segment=E_1.segments.A_1.timestamps,label=E_1.event",
        "",
    ),
    (
        "windows",
        'path,relevant_windows,label\na.mp4,"[[0, 2], [3, 5]]",run\n',
        "path=path,segment=relevant_windows,label=label",
        "2 samples of 1 file",
    ),
    (
        "words",
        [{"video": "a.mp4", "start": 1, "end": 9, "words": [{"start": 1, "end": 2}]}],
        "path=video,start=words.start,end=words.end,rest=fields",
        "start=start,end=end",
    ),
    (
        "segments by other names",
        [{"id": "a", "segments": [{"s": 1, "e": 3}]}],
        "path=id,rest=fields",
        r"segments\.s +kept as a field",
    ),
    (
        "two starts",
        [{"video": "a.mp4", "start": 1, "end": 9, "clip_start": 2, "clip_end": 3}],
        "path=video,start=start,end=end,rest=fields",
        "start=clip_start,end=clip_end",
    ),
    ("spans", "a.mp4 16 24\nb.mp4 1 4 30 60\n", "path=1,rest=fields", "starts and ends"),
    (
        "UCF-Crime",
        "a.mp4 Abuse 16 24 -1 -1\nb.mp4 Normal -1 -1 -1 -1\n",
        "path=1,label=2,rest=fields",
        "",
    ),
    (
        "one-hot",
        'path,label\na.mp4,"[0, 1, 0]"\nb.mp4,"[1, 0, 0]"\n',
        "path=path,rest=fields",
        "a 0 or a 1 per class",
    ),
    (
        "lists of NumPy",
        "path,label\na.mp4,[0 2]\nb.mp4,[3]\n",
        "path=path,rest=fields",
        "cannot be read",
    ),
    (
        "lists of lists",
        [{"path": "a.mp4", "label": [["run", 1, 2]]}],
        "path=path,rest=fields",
        "lists of lists",
    ),
    (
        "several marks",
        "path,label\na.mp4,run|walk\nb.mp4,walk\n",
        "path=path,label=label:bars",
        "label=label$",
    ),
    (
        "ELAN",
        "File\tTier\tBegin Time - ss.msec\tEnd Time - ss.msec\tAnnotation\n"
        + TAB_TIMES.format("1.500", "3.500", "2.000", "5.000"),
        "path=File,start=Begin Time - ss.msec,end=End Time - ss.msec,label=Annotation,rest=fields",
        "end - start: 2 to 3 seconds",
    ),
    (
        "ELAN, milliseconds",
        "File\tTier\tBegin Time - msec\tEnd Time - msec\tAnnotation\n"
        + TAB_TIMES.format("1500", "3500", "2000", "5000"),
        "path=File,start=Begin Time - msec:ms,end=End Time - msec:ms,label=Annotation,rest=fields",
        "end - start: 2 to 3 seconds",
    ),
    *(
        (
            start,
            f"video,{start},{end},label\na.mp4,1000000,3000000,run\nb.mp4,4,7,walk\n",
            f"path=video,start={start}{unit},end={end}{unit},label=label",
            "",
        )
        for start, end, unit in (
            ("t0", "t1", ""),
            ("in", "out", ""),
            ("first_frame", "last_frame", ":frames"),
            ("start_us", "end_us", ":us"),
            ("start_millis", "end_millis", ":ms"),
            ("onset", "offset", ""),
            ("START_ALIGNED", "END_ALIGNED", ""),
        )
    ),
    (
        "DALI",
        "a.mp4 0 10 60\na.mp4 1 60 90\nb.mp4 2 20 70\n",
        "path=1,start=3:frames,end=4:frames,label=2",
        "start=2:frames,length=3:frames,label=4",
    ),
    (
        "decimal commas",
        "video;begin;end;label\na.mp4;0,5;1,5;run\nb.mp4;1,0;2,25;walk\n",
        "path=video,start=begin,end=end,label=label",
        "end - start: 1 to 1.25 seconds",
    ),
    (
        "timecodes",
        "clip,start,end,label\na.mp4,00:00:01:05,00:00:03:02,run\n",
        "path=clip,rest=fields",
        "start holds times with frames, such as 00:00:01:05: write seconds",
    ),
    ("Cataract-101", "VideoID;FrameNo;Phase\na;5;1\na;9;2\n", "path=VideoID,rest=ignored", SPANS),
    (
        "change points",
        "video,start,label\na,0.5,idle\na,3.0,cut\n",
        "path=video,rest=ignored",
        "start has no end",
    ),
    (
        "a row a frame",
        "video,frame,label\na.mp4,0,run\na.mp4,1,walk\nb.mp4,0,walk\n",
        "path=video,rest=ignored",
        SPANS,
    ),
    (
        "nslt",
        {"a": {"subset": "train", "action": [77, 1, 55]}},
        "path=key,split=subset,rest=fields",
        "action holds .* as many numbers in each row",
    ),
    (
        "Label Studio",
        [{"data": {"video": "x/a.mp4"}, "annotations": [{"result": [{"value": RANGES[0]}]}]}],
        "path=data.video,start=annotations.result.value.ranges.start:frames,"
        "end=annotations.result.value.ranges.end:frames,label=annotations.result.value.timelinelabels",
        "",
    ),
    (
        "Label Studio, JSON-MIN",
        [{"video": "x/a.mp4", "id": 1, "tl": RANGES, "annotator": 1}],
        "path=video,start=tl.ranges.start:frames,end=tl.ranges.end:frames,label=tl.timelinelabels,rest=fields",
        "",
    ),
    (
        "Label Studio, choices",
        [{"id": 1, "data": {"video": "a.mp4"}, "annotations": [{"value": {"choices": ["run"]}}]}],
        "path=data.video,label=annotations.value.choices,rest=fields",
        "",
    ),
    (
        "BORIS",
        "Observation id\tBehavior\tBehavior type\tStart (s)\tStop (s)\tMedia file name\tComment\n"
        "x\tgroom\tSTATE\t1.0\t3.5\ta.mp4\t\nx\trear\tPOINT\t2.0\t2.0\tb.mp4\t\n",
        "path=Media file name,start=Start (s),end=Stop (s),label=Behavior,rest=fields",
        "1 of the rows cannot be used: its segment ends at 2, not after its start",
    ),
    (
        "START and STOP",
        "Time,File,Behavior,Status\n1.0,a.mp4,groom,START\n3.5,a.mp4,groom,STOP\n",
        "path=File,label=Behavior,rest=ignored",
        "Status says where segments begin or end: write a row for each",
    ),
    (
        "a column a class",
        "video,Action,Comedy\na.mp4,1,0\nb.mp4,0,1\n",
        "path=video,rest=fields",
        "Action, Comedy hold a 0 or a 1 each",
    ),
    ("flags", "a.mp4 1 0 1\nb.mp4 0 1 0\n", "path=1,rest=fields", "2, 3, 4 hold a 0 or a 1 each"),
    (
        "soft labels",
        [{"path": "a.mp4", "label": [0.1, 0.9]}],
        "path=path,rest=fields",
        "a number per class",
    ),
    (
        "soft labels in text",
        'path,label\na.mp4,"0.1,0.9"\nb.mp4,"0.8,0.2"\n',
        "path=path,rest=fields",
        "several numbers, not classes",
    ),
    (
        "soft labels in columns",
        "path,prob_run,prob_walk\na.mp4,0.1,0.9\nb.mp4,0.8,0.2\n",
        "path=path,rest=fields",
        "",
    ),
    *(
        (name, SPLITS_OF_ROWS.format(name), f"path=path,label=label,split={name}", "")
        for name in ("phase", "type", "data_split", "train/test")
    ),
    ("by class", {"run": ["a.mp4"], "walk": ["b.mp4", "42.webm"]}, "path=value,label=key", ""),
    ("by video", {"a.mp4": ["run", "sit"], "b.mp4": ["walk"]}, "path=key,label=value", ""),
    ("a class by video", {"a.mp4": "run", "b.mp4": "walk"}, "path=key,label=value", ""),
    ("by split", {"train": ["a.mp4", "42.webm"], "test": ["b.mp4"]}, "path=value,split=key", ""),
    (
        "ms-swift",
        [{"messages": MESSAGES, "videos": [name]} for name in ("a.mp4", "b.mp4")],
        "path=videos,rest=fields",
        "",
    ),
    (
        "LLaVA-Video",
        [{"video": "a.mp4", "conversations": MESSAGES, "id": n} for n in range(3)],
        "path=video,rest=ignored",
        SPANS,
    ),
    (
        "HowTo100M, categories",
        "video_id,category_1,category_2,rank\na,Hobbies,Crafts,1\nb,Hobbies,Cars,2\n",
        "path=video_id,label=category_1,rest=fields",
        "label=category_2",
    ),
]


@pytest.mark.parametrize(
    ("name", "content", "columns", "sentence"), SHOWN, ids=[row[0] for row in SHOWN]
)
def test_other_lists_are_shown_with_a_command_that_is_right(
    folder: Path, name: str, content: Any, columns: str, sentence: str, tmp_path: Path
) -> None:
    path = write_list(folder / "list", content)
    assert list_proposals(path)[0] == columns
    with pytest.raises(QuestionError) as question:
        make(path, tmp_path / "out")
    assert re.search(sentence, "\n".join([str(question.value), *question.value.details]), re.M)
    assert not (tmp_path / "out").exists()
    # Nothing that is asked is a dead end.
    assert read_labels(path, columns=columns, subset="all" if "split=" in columns else None)


# Values of --columns for a list with the columns path, start, end, label and person; and sentences.
COLUMNS = {
    "path=path,label=label": r"has other columns, too: start, end, person: keep .* \(rest=fields\)",
    "path=path,label=lable,rest=fields": "has no column lable, only path, .*: did you mean label",
    "path=path,label=9,rest=fields": "has no column 9, only path, start.*: give one, or its number",
    "path=path,start=start:min,end=end,rest=fields": "min is none of s, ms, us, frames .of times",
    "path=path,lable=label,rest=fields": "'lable' is nothing that a column may hold: did you mean la",
    "path=path,label=label,label=person": "label= stands there twice",
    "path=path,label=path,rest=fields": "path stands there twice",
    "path=path,rest=fields,rest=ignored": "rest= stands there twice",
    "path=path,rest=all": "rest is fields or ignored, not all",
    "label=label,rest=fields": "path=NAME is missing",
    "path": "'path' is not like path=NAME",
    "path=path,start=start,rest=fields": "has start: a segment needs start and end",
    "path=path,end=end,rest=fields": "has end: a segment needs start and end",
}


@pytest.mark.parametrize("columns", COLUMNS)
def test_mistakes_in_columns_are_explained(folder: Path, columns: str) -> None:
    rows = "path,start,end,label,person\na.mp4,1,2,run,x\n"
    path = write_list(folder / "list.csv", rows)
    with pytest.raises(InputError, match=COLUMNS[columns]):
        read_labels(path, columns=columns)


def test_columns_say_units_groups_and_what_is_kept(folder: Path) -> None:
    rows = "video;from;len;gloss;signer;x\na.mp4;1500;2000;run|sit;Ann;9\n"
    path = write_list(folder / "list.csv", rows)
    columns = "path=video,start=from:ms,length=3:ms,label=gloss:bars,group=signer"
    (item,) = read_inputs(str(path), ListOptions(columns=f"{columns},rest=fields"))
    assert (item.name, item.labels) == ("a.mp4#t=1.5,3.5", ("run", "sit"))
    assert json.loads(item.fields) == {"group": "Ann", "x": "9"}
    (item,) = read_inputs(str(path), ListOptions(columns=f"{columns},rest=ignored"))
    assert json.loads(item.fields) == {"group": "Ann"}
    (item,) = read_inputs(str(path), ListOptions(columns="path=1,rest=ignored"))
    assert (item.name, item.labels, item.fields) == ("a.mp4", None, "")


def test_a_format_is_forced_where_a_list_has_other_columns(folder: Path) -> None:
    """HACS' negatives are left out, which --columns cannot say."""
    head = "classname,youtube_id,subset,start,end,label,extra\n"
    rows = "run,AAAAAAAAAAA,train,1,3,1,x\nrun,AAAAAAAAAAA,train,4,6,-1,y\n"
    path = write_list(folder / "list.csv", head + rows)
    labels = {"AAAAAAAAAAA.mp4#t=1,3": "run"}
    assert read_labels(path, format="HACS Clips") == labels
    with pytest.raises(InputError, match="--format HACS is not known: did you mean HACS Clips"):
        read_labels(path, format="HACS")


def test_rows_of_one_video_that_differ_are_no_repetitions(folder: Path) -> None:
    path = write_list(folder / "list.csv", "path,caption\na.mp4,x\na.mp4,y\n")
    with pytest.raises(InputError, match=r"2 rows name a\.mp4 and differ in their fields"):
        read_labels(path, columns="path=path,caption=caption")
    assert read_labels(path, columns="path=path,rest=ignored") == {"a.mp4": None}


def test_a_row_of_many_that_has_other_cells_is_rejected(folder: Path) -> None:
    rows = "".join(f"a.mp4,{number}\n" for number in range(40))
    path = write_list(folder / "list.csv", f"{rows}b.mp4,dog, barking\n42\n")
    problems = {item.problem for item in read_inputs(str(path)) if item.problem}
    width = "its row has 1 cells more than there are columns: quote the one that holds a separator"
    assert problems >= {"it has no label, others have one", width}
    rows = '{"path": "a.mp4"}\n' * 2000 + '{"path": "b.mp4", "x": 1}\n'
    path = write_list(folder / "list.jsonl", rows)
    assert "! its row has 1 cells more" in str(read_labels(path))


def test_a_question_reads_the_first_rows_alone(folder: Path) -> None:
    rows = "".join(f"a.mp4,{number}\n" for number in range(5000))
    path = write_list(folder / "list.csv", f"path,x\n{rows}a.mp4,1,2,3\n")
    with pytest.raises(QuestionError) as question:
        read_inputs(str(path), ListOptions())
    assert any("the first 1,000 rows would be 1 sample " in line for line in question.value.details)
    # What has no --columns, such as visualize.py, reads the shards of a list.
    assert question.value.details[-1].endswith(f"{path} OUTPUT --columns path=path,rest=ignored")


def test_groups_of_a_list_are_held_out_whole(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = "path,label,group\na.mp4,run,x\nb.mp4,walk,x\n42,run,y\n43,walk,y\n"
    options = ["--hold-out", "0.5", "--dry-run"]
    assert make(write_list(folder / "list.csv", rows), tmp_path / "out", *options) == 0
    assert "held out: 1 of 2 groups" in capsys.readouterr().out


def test_a_dry_run_says_how_a_list_is_read_and_writes_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "list.csv").write_text("a.mp4 0\nb.mp4 1\na.mp4 0\n")
    assert make(folder / "list.csv", tmp_path / "out", "--dry-run") == 0
    output = capsys.readouterr().out
    assert "3 rows in" in output
    how = "path = column 1, label = column 2, format: paths and labels; below"
    assert f"(UTF-8, spaces, no header): {how}" in output
    found = "2 videos of 2 files, 2 classes (0, 1), 1 repeated row left out"
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
    columns = "path=video,label=label,rest=ignored"
    with pytest.raises(InputError, match="has several subsets, test, train: give --subset"):
        read_inputs(str(inputs), ListOptions(columns=columns))
    expected = {
        f"{train}/000000-video.mp4": "walk",
        f"{train}/000001-a.mp4": "run",
        f"{train}/000002-a.mp4": "walk",
    }
    assert read_labels(inputs, subset="train", columns=columns) == expected
    assert list_proposals(inputs, subset="train") == [columns.replace("ignored", "fields")]
    out = tmp_path / "out"
    options = ["--encode", "copy", "--subset", "train", "--columns", columns]
    assert make(inputs, out, *options) == 0
    stored = {sample.source: video_bytes(out, shard, sample) for shard, sample in all_samples(out)}
    assert stored == dict(zip(expected, videos, strict=True))

    path = tmp_path / "list"
    assert len(read_labels(write(path, {"video": videos}))) == 3
    write(path, {"video": cells, "mp4": videos})
    assert list_proposals(path) == ["path=video,rest=fields"]

    make_folder(tmp_path, {"a.mp4": "", "b.mp4": ""})
    paths = [{"bytes": None, "path": "a.mp4"}, {"bytes": None, "path": "b.mp4"}]
    column = pyarrow.array(paths, pyarrow.array(cells).type)
    write(path, {"video": column, "label": [1, -1]})
    labels = {"a.mp4": "walk", "b.mp4": "! it has no label, others have one"}
    assert read_labels(path) == labels, "-1 is no class"
    write(path, {"file_name": ["a.mp4", "b.mp4"], "class": ["run", "walk"], "image": image[:2]})
    assert read_labels(path, columns="path=1,label=class,rest=fields") == dict(AB)
    write(path, {"image": image})
    sentence = r"\(Parquet without the bytes of image\) names no video"
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

"""The published formats of lists.

A list is read without a question if it has the columns of one of these, and no other. To add a
format, write an entry here and a row of HEADS in test_lists.py.
"""

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from adamae.shard_tools.inputs.cells import Row, may_be_spans, to_text
from adamae.shard_tools.inputs.class_folders import GROUPS
from adamae.shard_tools.inputs.reading import FIELDS, Reading

# Roles of columns that a list may lack.
OPTIONAL = ("split", "group", "caption")
# The fraction of the sampled rows that must have as many cells as a format has columns.
MIN_FITTING = 0.9
# More people have not voted on a video of Moments in Time.
MAX_VOTES = 20
# The numbers behind the path of a row.
Numbers = Sequence[float]
NUMBER = r"-?\d+(?:\.\d+)?"
# Regular expressions for the cells of a column; the first column is that of the paths.
KINDS = {
    "path": ".*",
    "youtube_id": r"[\w-]{11}",
    "thumos": r"video_(validation|test)_\d{7}",
    "label": ".*",
    "name": rf"(?!{NUMBER}(\t|$)).*",
    "ids": r"\d+( +\d+)*",
    "time": NUMBER,
    "fraction": r"\d*\.\d+",
    "number": r"-?\d+",
    # A length of -1 means a segment that ends with the video.
    "length": r"-1|0*[1-9]\d*",
    "all": "-1",
    "start": r"\d+",
    "code": "[012]",
    "split": f"(?i:{'|'.join(GROUPS)})",
}


def _count_frames(rows: Sequence[Numbers], num_frames: Sequence[int]) -> bool:
    """Return whether each row has the number of frames in its folder, and a label.

    The list's author may have extracted frames with another version of FFmpeg, which gives one
    frame more or less.
    """
    pairs = zip(rows, num_frames, strict=True)
    return all(count and abs(row[0] - count) <= 1 for row, count in pairs)


def _are_votes(rows: Sequence[Numbers], num_frames: Sequence[int]) -> bool:
    """Return whether the last two numbers are votes for and against, and no start and end."""
    return all(MAX_VOTES > row[-2] > row[-1] for row in rows)


def _are_ids(rows: Sequence[Numbers], num_frames: Sequence[int]) -> bool:
    """Return whether rows of files have the ids of one class or of several, not starts and ends."""
    are_several = any(len(row) > 1 for row in rows)
    return are_several and not any(num_frames) and not all(map(may_be_spans, rows))


def _are_lengths(rows: Sequence[Numbers], num_frames: Sequence[int]) -> bool:
    """Return whether the second number can only be a length, not the end of a segment.

    If all frames of a folder from the first number on are as many as the second, it is one.
    """
    numbers = np.array(rows)
    counts = np.array(num_frames)
    starts = numbers[:, 0]
    lengths = numbers[:, 1]
    ends = starts + lengths
    if np.any((counts > 0) & (ends > counts + 1)):
        return False
    if np.all(ends == counts):
        return True
    are_ends = np.all(starts < lengths) and np.any(starts > 0)
    # DALI's lists have a label, a start and an end.
    are_starts = numbers.shape[1] > 2 and np.all(lengths < numbers[:, 2])
    return not are_ends and not are_starts


class Format(NamedTuple):
    """A published format of lists."""

    name: str
    # What the columns hold, as --columns writes it, but for those in `unused`. Lists may lack the
    # roles of OPTIONAL. Several readings, such as by verbs and by nouns, are asked about.
    readings: tuple[str, ...]
    # The other columns that these lists may have, with a comma between them.
    unused: str = ""
    # Of a list without a header: the kind of each column, a key of KINDS, the first a path.
    kinds: str = ""
    # What the kinds do not tell: returns whether rows without a header fit, given the number of
    # frames in the folder of each (0: its path is no such folder).
    fits: Callable[[Sequence[Numbers], Sequence[int]], bool] | None = None
    # A regular expression for the list's file name; its group, if any, is the label of all rows.
    list_name: str = ".*"
    # The split that each value of the column `split` means.
    splits: tuple[tuple[str, str], ...] = ()
    # (column, value, description): rows with this value are left out, and messages call them so.
    left_out: tuple[str, str, str] | None = None
    # A regular expression for text that is removed from labels, since no label map has it.
    removed: str = ""
    # The length of each segment in seconds, if no column gives an end or a length.
    seconds: float = math.inf
    # Whether frames are counted from 1, unless a segment starts at 0.
    is_numbered: bool = False
    # The reason why lists of this format cannot be read, and what the user can do.
    error: str = ""

    def match_header(self, names: Sequence[str]) -> list[Reading]:
        """Return the readings of a list with these columns; none if it has not this format."""
        by_key = {name.lower(): name for name in names}
        readings = []
        for text in self.readings:
            reading = Reading.parse(text)
            columns = {}
            for role, name in reading.columns.items():
                if name.lower() in by_key or role not in OPTIONAL:
                    columns[role] = by_key.get(name.lower(), "")
            allowed = {name.lower() for name in reading.columns.values()}
            allowed.update(self.unused.lower().split(","))
            # A list with the columns of one reading alone is another's: IKEA ASM has those of COIN
            # but the class, and counts frames.
            if "" in columns.values() or not by_key.keys() <= allowed:
                return []
            rest = FIELDS if len(names) > len(columns) else ""
            readings.append(replace(reading, columns=columns, rest=rest))
        return readings

    def match_rows(self, rows: Sequence[Row], path: str, num_frames: Sequence[int]) -> bool:
        """Return whether most rows without a header, whose column of paths is `path`, fit."""
        kinds = [f"({KINDS[kind]})" for kind in self.kinds.split()]
        pattern = re.compile("\t".join(kinds), re.DOTALL)
        numbers: list[list[float]] = []
        counts: list[int] = []
        for row, count in zip(rows, num_frames, strict=True):
            if len(row) != len(kinds):
                continue
            text = "\t".join(map(to_text, row.values()))
            if not pattern.fullmatch(text):
                return False
            behind_path = text.partition("\t")[2]
            numbers.append(list(map(float, re.findall(NUMBER, behind_path))))
            counts.append(count)
        if path != "1" or not counts or len(counts) < MIN_FITTING * len(rows):
            return False
        return self.fits is None or self.fits(numbers, counts)


ANNOTATION = "path=key,label=annotations.label,segment=annotations.segment,split=subset"
EPIC = (
    "path=video_id,start=start_timestamp,end=stop_timestamp,group=participant_id,caption=narration"
)
EGO4D = "clips.annotations.labels"
EGO4D_CLIP = (
    "clip_id clip_uid clip_start_sec clip_end_sec clip_start_frame clip_end_frame video_start_sec"
    " video_end_sec video_start_frame video_end_frame source_clip_uid annotations.annotator_uid"
    " annotations.labels.start_time annotations.labels.end_time annotations.labels.start_frame"
    " annotations.labels.end_frame annotations.labels.video_start_frame"
    " annotations.labels.video_end_frame annotations.labels.primary"
)
# Formats with a header, or with keys of JSON.
FORMATS = [
    Format(
        "Kinetics",
        ("path=youtube_id,label=label,start=time_start,end=time_end,split=split",),
        "is_cc",
    ),
    Format("ActivityNet, Kinetics (JSON)", (ANNOTATION,), "duration,url,resolution"),
    Format(
        "HACS Clips",
        ("path=youtube_id,label=classname,start=start,end=end,split=subset",),
        "label",
        left_out=("label", "-1", "HACS' negatives"),
    ),
    Format("ActivityNet Captions", ("path=key,segment=timestamps,caption=sentences",), "duration"),
    Format(
        "YouCook2",
        ("path=key,segment=annotations.segment,caption=annotations.sentence",),
        "annotations.id,duration,subset,recipe_type,video_url",
    ),
    Format(
        "COIN",
        ("path=key,label=annotation.label,segment=annotation.segment", "path=key,label=class"),
        "class,start,end,annotation,annotation.id,annotation.label,annotation.segment,duration,"
        "subset,recipe_type,video_url",
    ),
    Format(
        "Panda-70M",
        ("path=videoID,segment=timestamp,caption=caption",),
        "url,matching_score,desirable_filtering,shot_boundary_detection",
    ),
    Format("Charades-STA", ("path=id,start=start,end=end,caption=sentence",)),
    Format(
        "DiDeMo",
        ("path=video,segment=times,caption=description",),
        "num_segments,dl_link,annotation_id,reference_description,context,train_times",
        error="its times count pieces of 5 seconds",
    ),
    # Labels are templates with their objects filled in, and classes are the templates without [].
    Format(
        "Something-Something V2",
        ("path=id,label=template,caption=label",),
        "placeholders",
        removed=r"[\[\]]",
    ),
    Format("Something-Something V2, test", ("path=id",)),
    Format(
        "EPIC-KITCHENS-100",
        (f"{EPIC},label=verb", f"{EPIC},label=noun"),
        "narration_id,narration_timestamp,start_frame,stop_frame,verb,verb_class,noun,noun_class,"
        "all_nouns,all_noun_classes",
    ),
    Format(
        "Diving48", ("path=vid_name,label=label,start=start_frame:frames,end=end_frame:frames",)
    ),
    # A cell is "c092 11.90 21.20;c147 0.00 12.60": each action with its start and its end.
    Format(
        "Charades",
        ("path=id,label=actions:semicolons,caption=script",),
        "subject,scene,quality,relevance,verified,objects,descriptions,length,egocentric",
        removed=r" +[\d.]+ +[\d.]+$",
    ),
    Format(
        "AudioSet",
        ("path=YTID,label=positive_labels:commas,start=start_seconds,end=end_seconds",),
    ),
    Format("WebVid", ("path=videoid,caption=name",), "contentUrl,duration,page_dir"),
    # Its files are cut to the segments already, so the times in the whole video are not used.
    Format("MSR-VTT", ("path=video_id,label=category,split=split",), "start time,end time,url,id"),
    Format(
        "InternVid",
        ("path=YoutubeID,start=Start_timestamp,end=End_timestamp,caption=Caption",),
        "Aesthetic_Score,UMT_Score",
    ),
    Format("HowTo100M", ("path=key,start=start,end=end,caption=text",)),
    Format("HD-VILA", ("path=video_id,segment=clip.span",), "url,clip.clip_id"),
    Format(
        "OpenVid",
        ("path=video,caption=caption",),
        "aesthetic score,motion score,temporal consistency score,camera motion,frame,fps,seconds",
    ),
    Format("TVR", ("path=vid_name,segment=ts,caption=desc",), "desc_id,duration,type"),
    Format(
        "Ego4D moments",
        (
            f"path=video_uid,label={EGO4D}.label,start={EGO4D}.video_start_time"
            f",end={EGO4D}.video_end_time",
        ),
        "split," + ",".join(f"clips.{name}" for name in EGO4D_CLIP.split()),
    ),
    Format(
        "EgoClip",
        ("path=video_uid,start=clip_start,end=clip_end,caption=clip_text",),
        "video_dur,narration_source,narration_ind,narration_time,tag_verb,tag_noun",
    ),
    # Its files are cut to the frames already, and its boxes are of the whole clips.
    Format(
        "WLASL",
        ("path=instances.video_id,label=gloss,split=instances.split,group=instances.signer_id",),
        ",".join(
            f"instances.{name}"
            for name in "bbox fps frame_start frame_end instance_id source url variation_id".split()
        ),
    ),
    Format(
        "How2Sign",
        ("path=VIDEO_NAME,start=START_REALIGNED,end=END_REALIGNED,caption=SENTENCE",),
        "VIDEO_ID,SENTENCE_ID,SENTENCE_NAME",
    ),
    # Its start and its end are always -1.
    Format(
        "PHOENIX-2014-T",
        ("path=name,group=speaker,caption=translation",),
        "video,start,end,orth",
    ),
    Format(
        "Drive&Act",
        (
            "path=file_id,label=activity,start=frame_start:frames,end=frame_end:frames"
            ",group=participant_id",
        ),
        "annotation_id,chunk_id",
    ),
    Format(
        "EchoNet-Dynamic",
        ("path=FileName,split=Split",),
        "EF,ESV,EDV,FrameHeight,FrameWidth,FPS,NumberOfFrames",
    ),
    Format("DFDC", ("path=key,label=label,split=split",), "original"),
]

BOXES = "it names boxes of persons at moments, as AVA's lists do, not classes of videos"
# Formats without a header; the first that fits is taken.
WITHOUT_HEADER = [
    Format(
        "THUMOS14",
        ("path=1,start=2,end=3",),
        kinds="thumos time time",
        list_name=r"(?:.*/)?(?!Ambiguous)(.+?)_(?:val|test)\.txt",
    ),
    Format(
        "HMDB51",
        ("path=1,split=2",),
        kinds="path code",
        list_name=r"(?:.*/)?(.+)_test_split\d\.txt",
        splits=(("1", "train"), ("2", "test"), ("0", "neither")),
    ),
    Format(
        "VGGSound",
        ("path=1,start=2,label=3,split=4",),
        kinds="youtube_id number name split",
        seconds=10,
    ),
    Format(
        "Moments in Time",
        ("path=1,label=2,rest=fields",),
        kinds="path name number number",
        fits=_are_votes,
    ),
    Format(
        "VideoMAEv2, mmaction2: segments",
        ("path=1,start=2:frames,length=3:frames,label=4",),
        kinds="path start length number",
        fits=_are_lengths,
    ),
    Format(
        "VideoMAEv2 for pre-training",
        ("path=1,start=2:frames,length=3:frames",),
        kinds="path start all",
    ),
    Format(
        "folders of frames, their number, label",
        ("path=1,label=3,rest=ignored",),
        kinds="path number number",
        fits=_count_frames,
    ),
    Format(
        "VideoMAEv2: folders of frames, start, number",
        ("path=1,start=2:frames,length=3:frames",),
        kinds="path start length",
        fits=_are_lengths,
        is_numbered=True,
    ),
    Format(
        "mmaction2: several labels",
        ("path=1,label=2:spaces",),
        kinds="path ids",
        # Behind a folder of frames, the first number would be that of the frames.
        fits=_are_ids,
    ),
    Format("AVA", ("path=1",), kinds=f"path time{4 * ' fraction'} time", error=BOXES),
    Format("AVA", ("path=1",), kinds=f"path time{4 * ' fraction'} time time", error=BOXES),
]
# Formats whose lists are not doubted: no other list has their columns.
PUBLISHED = (*FORMATS, *WITHOUT_HEADER)
# Those of everybody, whose cells may hold something else.
WITHOUT_HEADER += [
    Format("paths and labels", ("path=1,label=2",), kinds="path label"),
    Format("paths", ("path=1",), kinds="path"),
]
# The columns of lists that are no published format and are read without a question all the same:
# those of a role by its own name.
CONTRACT = Format("the columns of docs/shards.md", ())
PATHS = ("path", "file_name", "video")
CONTRACT_ROLES = ("label", "start", "end", "split", "group", "caption")
AS_GIVEN = Format("as --columns says", ())


def match_contract(names: Sequence[str]) -> Reading | None:
    """Return the reading of a list whose columns all have names of the contract, else None."""
    columns = {}
    for name in names:
        role = "path" if name.lower() in PATHS else name.lower()
        if role in columns or role not in ("path", *CONTRACT_ROLES):
            return None
        columns[role] = name
    if "path" not in columns or ("start" in columns) != ("end" in columns):
        return None
    return Reading(columns, {})


def _list_column_names() -> set[str]:
    """Return the names of all columns that a header of the contract or of FORMATS may have."""
    names = {*PATHS, *CONTRACT_ROLES}
    for entry in FORMATS:
        for text in entry.readings:
            names.update(name.lower() for name in Reading.parse(text).columns.values())
    # In JSON alone, it is the key of an object.
    return names - {"key"}


COLUMN_NAMES = _list_column_names()

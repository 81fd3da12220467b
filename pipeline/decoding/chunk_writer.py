"""Write the clips of a chunk to its slots: as RGB, as decoded planes, or as encoded videos."""

import time
from functools import cache, partial

import numpy as np
from jaxtyping import UInt8

from adamae.kernels.clip_tables import color_matrix
from adamae.pipeline.clip_memory import BlockLayout
from adamae.pipeline.decoding.chunks import Chunk, ChunkResult, LoadedClip, WorkerSetup
from adamae.pipeline.decoding.colors import CHROMA_OFFSETS
from adamae.pipeline.decoding.encoded import MJPEG, Encoded, EncodedPictures, EncodedVideo
from adamae.pipeline.decoding.planes import PlanarFrames
from adamae.pipeline.decoding.sources import find_source
from adamae.pipeline.planning.plan import PlanRow, index_frames
from adamae.pipeline.shards.format import Sample
from adamae.pipeline.shards.gops import VideoSlice
from adamae.pipeline.video_error import VideoError

Block = UInt8[np.ndarray, " bytes"]

# Almost all videos of a dataset share one matrix.
make_color_matrix = cache(color_matrix)


class ChunkSlots:
    """The memory of a chunk: its clips' slots, allocated from the first byte on without gaps.

    What remains always has room for the chunk's remaining clips as RGB, so a video that does not
    decode to planes never lacks it. Example: a chunk has 4 clips of 100 bytes as RGB in slots of
    150 bytes, 600 bytes in all. The first clip may take at most 300 bytes, which leaves 100 for
    each of the other three. If it takes 200, the second may take 200, too.
    """

    def __init__(self, layout: BlockLayout, block: Block, chunk: Chunk) -> None:
        self._block = block
        self._layout = layout
        self._first_clip = chunk.first
        self._end_clip = chunk.first + chunk.num_clips
        self._start = self._first_clip * layout.slot_bytes
        self._end = self._end_clip * layout.slot_bytes
        self.used_bytes = 0

    def allocate(
        self, next_clip: int, num_bytes: int
    ) -> tuple[int, UInt8[np.ndarray, " num_bytes"]] | None:
        """Return where in the block the next `num_bytes` begin, and the bytes.

        Return None if the clips from index `next_clip` of the batch on would have no room as RGB
        then.
        """
        start = self._start + self.used_bytes
        reserved_bytes = (self._end_clip - next_clip) * self._layout.clip_bytes
        if start + num_bytes + reserved_bytes > self._end:
            return None
        self.used_bytes += num_bytes
        return start, self._block[start : start + num_bytes]

    def skip_to(self, clip: int) -> None:
        """Continue at the slot of the clip with this index, behind encoded videos of any size."""
        self.used_bytes = (clip - self._first_clip) * self._layout.slot_bytes


class ChunkWriter:
    """Makes the clips of a chunk, and collects in `result` what the loader has to know of them."""

    def __init__(self, setup: WorkerSetup, block: Block, chunk: Chunk) -> None:
        self.result = ChunkResult(chunk)
        self._setup = setup
        self._layout = setup.layout
        self._slots = ChunkSlots(setup.layout, block, chunk)
        self._tables: list[np.ndarray] = []
        if setup.upload_planes:
            num_clips = len(setup.plan.positions(chunk.batch))
            self._tables = setup.layout.view_tables(block, num_clips)

    def add_video(self, first: int, rows: list[PlanRow], video: VideoSlice) -> None:
        """Add the clips that `rows` cut out of a video.

        `first` is the index of the first one in the batch. Raise VideoError if the video cannot be
        decoded; nothing is added then.
        """
        started = time.perf_counter()
        sample = self._setup.dataset.samples[rows[0].sample]
        if not self._setup.upload_planes:
            # Clips are used where they are, so each has to be in its own slot.
            self._slots.skip_to(first)
        used_before = self._slots.used_bytes
        image_start: int | None = None
        num_decoded = 0
        try:
            if not self._keep_encoded(first, rows, sample, video):
                image_start, num_decoded = self._decode(first, rows, sample, video)
                decode_s = time.perf_counter() - started
                self.result.counts.update(decode_seconds=decode_s)  # type: ignore[call-overload]
        except VideoError:
            self._slots.used_bytes = used_before
            raise
        self.result.used_bytes = self._slots.used_bytes
        fields = [sample.fields.get(name) for name in self._setup.config.fields]
        for row in rows:
            clip = LoadedClip(
                row.position,
                sample.key,
                sample.labels or (),
                fields,
                # These two, since whole rows would cost the loader's process .1 ms a batch.
                row.augment_ops,
                row.erase_box,
                image_start,
            )
            self.result.clips.append(clip)
            if image_start is not None:
                image_start += self._layout.clip_bytes
        self.result.counts.update(
            videos_read=1, bytes_read=len(video.data), frames_decoded=num_decoded
        )

    def _keep_encoded(
        self, first: int, rows: list[PlanRow], sample: Sample, video: VideoSlice
    ) -> bool:
        """Write a video to the slots as it is if the GPU decoder takes it; return whether."""
        if not self.result.chunk.is_for_gpu or not self._setup.gpu_codecs.include(sample, video):
            return False
        encoded: Encoded | None
        if sample.codec == MJPEG:
            encoded = EncodedPictures.find(video, rows, (sample.width, sample.height))
        else:
            encoded = EncodedVideo.find(video, rows)
        if encoded is None:
            return False
        allocated = self._slots.allocate(first + len(rows), len(video.data))
        if allocated is None:
            return False
        start, memory = allocated
        memory[:] = np.frombuffer(video.data, np.uint8)
        span = slice(start, start + len(video.data))
        self.result.encoded[first] = encoded._replace(span=span)
        return True

    def _decode(
        self, first: int, rows: list[PlanRow], sample: Sample, video: VideoSlice
    ) -> tuple[int | None, int]:
        """Decode a video to planes if the device takes them, otherwise to RGB.

        Return where in the block the RGB of its clips begins, None for planes, and the number of
        frames decoded.
        """
        source = find_source(video.data)
        allocate = partial(self._slots.allocate, first + len(rows))
        if self._setup.upload_planes:
            used_before = self._slots.used_bytes
            frame_size = self._setup.plan.frame_size
            planes = source.copy_planes(video, sample, rows, frame_size, allocate)
            if planes is not None:
                self._fill_tables(slice(first, first + len(rows)), rows, planes)
                return None, planes.num_decoded
            # It may have allocated before a frame came that does not match the ones before.
            self._slots.used_bytes = used_before
        allocated = allocate(len(rows) * self._layout.clip_bytes)
        assert allocated is not None
        start, memory = allocated
        clips = memory.reshape(len(rows), *self._layout.clip_shape)
        return start, source.cut_views(video, sample, rows, clips)

    def _fill_tables(self, clips: slice, rows: list[PlanRow], frames: PlanarFrames) -> None:
        """Write the rows `clips` of the tables: how the device makes clips of planes.

        See kernels.DecodedClips. Example: two clips show the boxes at x = 40 and x = 90, both at y
        = 20, 100 wide and high. The window that was copied is the box at (40, 20), 150 wide and 100
        high, and takes 22,500 bytes a frame. Frames 3 and 5 were copied to bytes 1,000 and 23,500
        of the block. Both clips have the offsets [1000, 23500] and the size (100, 150, 1); their
        boxes are (0, 0, 100, 100) and (50, 0, 100, 100), counted from the window's corner. The
        offsets are bytes of the block until `upload` changes them to bytes of the device's memory.
        """
        offsets, sizes, boxes, flips, matrices, siting = self._tables
        window = frames.window
        layout = frames.layout
        offsets[clips] = np.array(frames.offsets)[index_frames(rows)]
        sizes[clips] = window.height, window.width, layout.sample_bytes
        boxes[clips] = [
            (row.crop.x - window.x, row.crop.y - window.y, row.crop.width, row.crop.height)
            for row in rows
        ]
        flips[clips] = [row.flip for row in rows]
        matrices[clips] = make_color_matrix(layout.matrix, layout.full_range, layout.bits)
        siting[clips] = CHROMA_OFFSETS[layout.siting]

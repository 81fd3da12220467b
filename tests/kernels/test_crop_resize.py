"""Crops of decoded planes: Triton against the reference; that against torch's scaler, FFmpeg's, and arithmetic."""

from itertools import product

import numpy as np
import pytest
import torch
from av.filter import Graph
from av.video.frame import VideoFrame
from kernel_material import run_reference
from torch.nn.functional import interpolate

from adamae.common.errors import InputError
from adamae.kernels import clip_tables
from adamae.kernels.clip_tables import LUMA_WEIGHTS
from adamae.kernels.crop_resize import DecodedClips, crop_resize

SITING = {"left": (0.0, 0.5), "center": (0.5, 0.5), "top left": (0.0, 0.0), "bottom": (0.5, 1.0)}
IDENTITY = torch.eye(3, 4)
GRAY_LEVEL = 1  # of images that are both rounded


def color_matrix(colorspace, full_range, bits):
    return torch.from_numpy(clip_tables.color_matrix(colorspace, full_range, bits))


def plane_shapes(height, width):
    return [(height, width), *[((height + 1) // 2, (width + 1) // 2)] * 2]


def pack(planes, bits=8):
    """The bytes of one frame."""
    samples = torch.cat([plane.flatten() for plane in planes])
    return samples.to(torch.uint8) if bits == 8 else samples.to(torch.int16).view(torch.uint8)


def one_clip(planes, box, matrix, siting="center", flip=False, bits=8):
    """A clip of one frame; matrix fp32 [3, 4]."""
    sizes, boxes = (
        torch.tensor([[*planes[0].shape, 1 if bits == 8 else 2]]).int(),
        torch.tensor([box]).int(),
    )
    start, flips, sitings = (
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([flip]),
        torch.tensor([SITING[siting]]),
    )
    return DecodedClips(pack(planes, bits), start, sizes, boxes, flips, matrix[None], sitings)


def noise(height, width, bits=8):
    return [torch.randint(0, 2**bits, shape) for shape in plane_shapes(height, width)]


def mixed_clips():
    """Frames of two sizes and depths, in another order than they are packed in, one of them twice, one at odd bytes."""
    one = one_clip(
        noise(33, 51), (11, 5, 40, 28), color_matrix("bt709", False, 8), "left", flip=True
    )
    other = one_clip(
        noise(24, 20, 10), (3, 7, 9, 11), color_matrix("bt2020nc", True, 10), "top left", bits=10
    )
    planes = torch.cat(
        [one.planes, torch.zeros(1, dtype=torch.uint8), pack(noise(33, 51)), other.planes]
    )
    second, third = len(one.planes) + 1, len(planes) - len(other.planes)
    both = DecodedClips(*map(torch.cat, zip(one, other, strict=True)))
    return both._replace(planes=planes, offsets=torch.tensor([[second, 0], [third, third]]))


def test_triton_gives_what_the_reference_gives(device):
    clips = mixed_clips()
    got = crop_resize(
        DecodedClips(*(table.to(device) for table in clips)), 17, 33
    )  # interpreted: .3 s a tile
    expected = run_reference(crop_resize, clips, 17, 33)
    assert got.shape == (2, 2, 17, 33, 3)
    off = (got.cpu().int() - expected.int()).abs()
    assert off.max() <= GRAY_LEVEL
    assert (off > 0).float().mean() < 1e-3  # ties


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 40, 30), (30, 40)),
        ((3, 5, 31, 23), (7, 9)),
        ((6, 2, 11, 9), (20, 31)),
        ((39, 0, 1, 30), (4, 3)),
    ],
)
def test_luma_is_scaled_as_torch_scales_with_antialiasing(box, size):
    planes, (x, y, w, h) = noise(30, 40), box
    got = crop_resize(one_clip(planes, box, IDENTITY), *size)[0, 0, :, :, 0]
    crop = planes[0][y : y + h, x : x + w].float()[None, None]
    expected = interpolate(crop, size, mode="bilinear", antialias=True)[0, 0]
    assert (got - expected).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("box", [(5, 7, 20, 12), (4, 6, 21, 13)])
def test_nothing_outside_the_box_counts(box):
    planes, (x, y, w, h) = noise(32, 48), box
    others = noise(32, 48)
    for scale, plane, other in zip((1, 2, 2), planes, others, strict=True):
        box_of_plane = np.s_[
            y // scale : (y + h - 1) // scale + 1, x // scale : (x + w - 1) // scale + 1
        ]
        other[box_of_plane] = plane[box_of_plane]
    matrix = color_matrix("bt709", False, 8)
    for size in ((5, 7), (30, 40)):
        pair = [
            crop_resize(one_clip(frame, box, matrix, "left"), *size) for frame in (planes, others)
        ]
        assert torch.equal(*pair)


@pytest.mark.parametrize(
    ("colorspace", "full_range", "bits"), product(LUMA_WEIGHTS, (False, True), (8, 10, 16))
)
def test_a_color_matrix_undoes_the_definition_of_its_standard(colorspace, full_range, bits):
    """E'Y = K_R R + K_G G + K_B B, E'PB = (B - E'Y) / (2 - 2 K_B), quantized as in Rec. ITU-T H.273 §8.3."""
    red, blue = {
        "smpte170m": (0.299, 0.114),
        "bt709": (0.2126, 0.0722),
        "bt2020nc": (0.2627, 0.0593),
    }[colorspace]
    rgb = torch.tensor(
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.2, 0.5, 0.7]],
        dtype=torch.float64,
    )
    y = rgb @ torch.tensor([red, 1 - red - blue, blue], dtype=torch.float64)
    pb, pr = (rgb[:, 2] - y) / (2 - 2 * blue), (rgb[:, 0] - y) / (2 - 2 * red)
    if full_range:
        stored = [
            (2**bits - 1) * y,
            (2**bits - 1) * pb + 2 ** (bits - 1),
            (2**bits - 1) * pr + 2 ** (bits - 1),
        ]
    else:
        stored = [
            2 ** (bits - 8) * value for value in (219 * y + 16, 224 * pb + 128, 224 * pr + 128)
        ]
    got = color_matrix(colorspace, full_range, bits).double() @ torch.stack(
        [*stored, torch.ones(6)]
    )
    torch.testing.assert_close(got.T, 255 * rgb, rtol=0, atol=1e-4)


def scale_with_ffmpeg(planes, box, size, colorspace, full_range, bits, siting, flip):
    """What FFmpeg's scaler makes of the crop, which is cut out here: FFmpeg's crop moves chroma at odd offsets."""
    x, y, w, h = box
    shown = zip(planes, (1, 2, 2), plane_shapes(h, w), strict=True)
    crops = [
        plane[y // step :, x // step :][:rows, :columns] for plane, step, (rows, columns) in shown
    ]
    samples = torch.cat([crop.flatten() for crop in crops]).view(-1, w).numpy()
    kind, name = (np.uint8, "yuv420p") if bits == 8 else (np.uint16, f"yuv420p{bits}le")
    frame = VideoFrame.from_ndarray(samples.astype(kind), name)
    # In 1/256 pixels. At an odd offset, the first sample lies a pixel before the crop.
    right, below = (
        round(256 * (offset - start % 2))
        for offset, start in zip(SITING[siting], (x, y), strict=True)
    )
    graph = Graph()
    steps = [
        ("buffer", f"video_size={w}x{h}:pix_fmt={frame.format.name}:time_base=1/1"),
        ("setparams", f"colorspace={colorspace}:range={'pc' if full_range else 'tv'}"),
        (
            "scale",
            f"{size[1]}:{size[0]}:flags=bilinear+accurate_rnd+full_chroma_int"
            f":in_h_chr_pos={right}:in_v_chr_pos={below}",
        ),
        ("format", "rgb24"),
    ]
    graph.link_nodes(*(graph.add(*step) for step in steps), graph.add("buffersink")).configure()
    graph.vpush(frame)
    image = torch.from_numpy(graph.vpull().to_ndarray())
    return image.flip(1) if flip else image


def texture(bits):
    """Smooth planes with edges and some noise, 180 x 241 pixels: luma over its whole range, chroma over half of it."""
    planes = []
    for number, (rows, columns) in enumerate(plane_shapes(180, 241)):
        y, x = torch.linspace(0, 1, rows)[:, None], torch.linspace(0, 1, columns)
        waves = (
            torch.sin(18 * x + 8 * y + number)
            + torch.sin(46 * y * x + 2 * number)
            + ((x - y).abs() < 0.3)
        )
        level = (waves + 2) / 5 + 0.02 * torch.randn(rows, columns)
        level = level if number == 0 else 0.25 + 0.5 * level
        planes.append((level.clamp(0, 1) * (2**bits - 1)).round().long())
    return planes


FFMPEG_CASES = [  # box, size, siting, flip; of even sides: FFmpeg stretches chroma by half a sample over odd ones
    ((0, 0, 240, 180), (90, 120), "left", False),  # half the size
    ((20, 16, 128, 128), (112, 112), "center", False),  # little smaller
    ((5, 3, 96, 140), (280, 192), "left", True),  # twice as large, at an odd offset
    ((3, 2, 228, 168), (34, 46), "top left", True),  # a fifth
    ((12, 7, 96, 96), (96, 96), "bottom", False),  # the same size
]


@pytest.mark.parametrize(
    ("colorspace", "full_range", "bits"), product(LUMA_WEIGHTS, (False, True), (8, 10))
)
def test_ffmpegs_scaler_gives_the_same_within_a_gray_level(colorspace, full_range, bits):
    planes, matrix = texture(bits), color_matrix(colorspace, full_range, 8)
    matrix[:, :3] /= 2 ** (
        bits - 8
    )  # FFmpeg takes 1020 of 10 bits for white in full range too, where it is 1023
    for box, size, siting, flip in FFMPEG_CASES:
        got = crop_resize(one_clip(planes, box, matrix, siting, flip, bits), *size)[0, 0]
        expected = scale_with_ffmpeg(planes, box, size, colorspace, full_range, bits, siting, flip)
        off = (got.int() - expected.int()).abs()
        assert off.float().mean() <= 0.3
        # Near the border FFmpeg differs: it repeats the outermost samples outside the box, which therefore count more,
        # and at odd offsets leaves out the last sample of chroma, which colors two pixels more than its own.
        margin = 3 * max(1, size[0] // box[3])
        inner = off[margin:-margin, margin:-margin].float()
        assert inner.mean() <= 0.02
        assert inner.max() <= GRAY_LEVEL


CLIP = one_clip(noise(16, 20), (0, 0, 20, 16), IDENTITY)
MISUSES = {
    "offsets have shape": {"offsets": torch.zeros(1, dtype=torch.int64)},
    r"boxes are torch.int64 \(1, 4\): give torch.int32": {"boxes": CLIP.boxes.long()},
    r"siting are torch.float32 \(2, 2\)": {"siting": torch.zeros(2, 2)},
    "siting are on meta, planes on cpu": {"siting": CLIP.siting.to("meta")},
    "samples of clip 0 have 3 bytes": {"sizes": torch.tensor([[16, 20, 3]], dtype=torch.int32)},
    "the box of clip 0, 20x16 at 1, 0, does not lie in its frames of 20x16": {
        "boxes": torch.tensor([[1, 0, 20, 16]], dtype=torch.int32)
    },
    "frames of clip 0 do not lie at": {"offsets": torch.ones(1, 1, dtype=torch.int64)},
    r"do not lie at its offsets \[-1\]": {"offsets": -torch.ones(1, 1, dtype=torch.int64)},
}


@pytest.mark.parametrize("sentence", MISUSES)
def test_misuse_is_told_before_memory_is_read(sentence):
    with pytest.raises(InputError, match=sentence):
        crop_resize(CLIP._replace(**MISUSES[sentence]), 8, 8)


def test_clips_without_pixels_and_unknown_colors_are_refused():
    with pytest.raises(InputError, match="0 x 8 pixels"):
        crop_resize(CLIP, 0, 8)
    with pytest.raises(
        InputError, match="colorspace is bt2020c: give one of smpte170m, bt709, bt2020nc"
    ):
        color_matrix("bt2020c", False, 10)
    with pytest.raises(InputError, match="7 bits"):
        color_matrix("bt709", False, 7)

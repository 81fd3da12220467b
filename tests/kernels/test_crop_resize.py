"""Crops of decoded planes.

Triton against the reference; the reference against torch's scaler, FFmpeg's, and arithmetic.
"""

from itertools import product

import numpy as np
import pytest
import torch
from av.filter import Graph
from av.video.frame import VideoFrame
from kernel_material import run_reference
from torch import Tensor
from torch.nn.functional import interpolate

from adamae.common.errors import InputError
from adamae.kernels import clip_tables
from adamae.kernels.clip_tables import LUMA_WEIGHTS
from adamae.kernels.crop_resize import DecodedClips, crop_resize

SITING = {"left": (0.0, 0.5), "center": (0.5, 0.5), "top left": (0.0, 0.0), "bottom": (0.5, 1.0)}
IDENTITY = torch.eye(3, 4)
# Of images that are both rounded.
GRAY_LEVEL = 1


def color_matrix(colorspace: str, full_range: bool, bits: int) -> Tensor:
    return torch.from_numpy(clip_tables.color_matrix(colorspace, full_range, bits))


def plane_shapes(height: int, width: int) -> list[tuple[int, int]]:
    chroma = ((height + 1) // 2, (width + 1) // 2)
    return [(height, width), chroma, chroma]


def pack(planes: list[Tensor], bits: int = 8) -> Tensor:
    """Return the bytes of a frame."""
    samples = torch.cat([plane.flatten() for plane in planes])
    if bits == 8:
        return samples.to(torch.uint8)
    return samples.to(torch.int16).view(torch.uint8)


def one_clip(
    planes: list[Tensor],
    box: tuple[int, int, int, int],
    matrix: Tensor,
    siting: str = "center",
    flip: bool = False,
    bits: int = 8,
) -> DecodedClips:
    """Make a clip of one frame; matrix is fp32 [3, 4]."""
    sample_bytes = 1 if bits == 8 else 2
    return DecodedClips(
        planes=pack(planes, bits),
        offsets=torch.zeros(1, 1, dtype=torch.int64),
        sizes=torch.tensor([[*planes[0].shape, sample_bytes]]).int(),
        boxes=torch.tensor([box]).int(),
        flips=torch.tensor([flip]),
        matrices=matrix[None],
        siting=torch.tensor([SITING[siting]]),
    )


def noise(height: int, width: int, bits: int = 8) -> list[Tensor]:
    """Make random planes Y, U and V."""
    return [torch.randint(0, 2**bits, shape) for shape in plane_shapes(height, width)]


def mixed_clips() -> DecodedClips:
    """Make two clips of frames of two sizes and depths.

    They are packed in another order; one frame is shown twice, and one lies at odd bytes.
    """
    one = one_clip(
        noise(33, 51), (11, 5, 40, 28), color_matrix("bt709", False, 8), "left", flip=True
    )
    other = one_clip(
        noise(24, 20, 10), (3, 7, 9, 11), color_matrix("bt2020nc", True, 10), "top left", bits=10
    )
    padding = torch.zeros(1, dtype=torch.uint8)
    planes = torch.cat([one.planes, padding, pack(noise(33, 51)), other.planes])
    second = len(one.planes) + 1
    third = len(planes) - len(other.planes)
    both = DecodedClips(*map(torch.cat, zip(one, other, strict=True)))
    return both._replace(planes=planes, offsets=torch.tensor([[second, 0], [third, third]]))


def test_triton_gives_what_the_reference_gives(device: torch.device) -> None:
    clips = mixed_clips()
    on_device = DecodedClips(*(table.to(device) for table in clips))
    # Few tiles: interpreted, each takes 0.3 s.
    images = crop_resize(on_device, 17, 33)
    expected = run_reference(crop_resize, clips, 17, 33)
    assert images.shape == (2, 2, 17, 33, 3)
    difference = (images.cpu().int() - expected.int()).abs()
    assert difference.max() <= GRAY_LEVEL
    # Ties are rounded either way.
    assert (difference > 0).float().mean() < 1e-3


def test_compiled_for_8_bits_alone_the_kernel_gives_the_same(device: torch.device) -> None:
    clip = one_clip(noise(33, 51), (11, 5, 40, 28), color_matrix("bt709", False, 8), "left")
    on_device = DecodedClips(*(table.to(device) for table in clip))
    expected = crop_resize(on_device, 17, 33)
    assert torch.equal(crop_resize(on_device, 17, 33, any_wide=False), expected)


@pytest.mark.parametrize(
    ("box", "size"),
    [
        ((0, 0, 40, 30), (30, 40)),
        ((3, 5, 31, 23), (7, 9)),
        ((6, 2, 11, 9), (20, 31)),
        ((39, 0, 1, 30), (4, 3)),
    ],
)
def test_luma_is_scaled_as_torch_scales_with_antialiasing(
    box: tuple[int, int, int, int], size: tuple[int, int]
) -> None:
    planes = noise(30, 40)
    x, y, w, h = box
    # With this matrix, red is luma.
    luma = crop_resize(one_clip(planes, box, IDENTITY), *size)[0, 0, :, :, 0]
    crop = planes[0][y : y + h, x : x + w].float()[None, None]
    expected = interpolate(crop, size, mode="bilinear", antialias=True)[0, 0]
    # luma is rounded, and torch's is not.
    assert (luma - expected).abs().max() <= 0.5 + 1e-3


@pytest.mark.parametrize("box", [(5, 7, 20, 12), (4, 6, 21, 13)])
def test_nothing_outside_the_box_counts(box: tuple[int, int, int, int]) -> None:
    planes = noise(32, 48)
    x, y, w, h = box
    # Other planes that are equal in the box, chroma also where it colors one of the box's pixels.
    others = noise(32, 48)
    for scale, plane, other in zip((1, 2, 2), planes, others, strict=True):
        rows = slice(y // scale, (y + h - 1) // scale + 1)
        columns = slice(x // scale, (x + w - 1) // scale + 1)
        other[rows, columns] = plane[rows, columns]
    matrix = color_matrix("bt709", False, 8)
    for size in ((5, 7), (30, 40)):
        image = crop_resize(one_clip(planes, box, matrix, "left"), *size)
        assert torch.equal(crop_resize(one_clip(others, box, matrix, "left"), *size), image)


@pytest.mark.parametrize(
    ("colorspace", "full_range", "bits"), product(LUMA_WEIGHTS, (False, True), (8, 10, 16))
)
def test_a_color_matrix_undoes_the_definition_of_its_standard(
    colorspace: str, full_range: bool, bits: int
) -> None:
    """E'Y = K_R R + K_G G + K_B B and E'PB = (B - E'Y) / (2 - 2 K_B), and E'PR alike.

    They are quantized as in Rec. ITU-T H.273 §8.3.
    """
    weights = {
        "smpte170m": (0.299, 0.114),
        "bt709": (0.2126, 0.0722),
        "bt2020nc": (0.2627, 0.0593),
    }
    red, blue = weights[colorspace]
    rgb = torch.tensor(
        [[0, 0, 0], [1, 1, 1], [1, 0, 0], [0, 1, 0], [0, 0, 1], [0.2, 0.5, 0.7]],
        dtype=torch.float64,
    )
    y = rgb @ torch.tensor([red, 1 - red - blue, blue], dtype=torch.float64)
    pb = (rgb[:, 2] - y) / (2 - 2 * blue)
    pr = (rgb[:, 0] - y) / (2 - 2 * red)
    if full_range:
        largest = 2**bits - 1
        middle = 2 ** (bits - 1)
        stored = [largest * y, largest * pb + middle, largest * pr + middle]
    else:
        step = 2 ** (bits - 8)
        stored = [step * (219 * y + 16), step * (224 * pb + 128), step * (224 * pr + 128)]
    matrix = color_matrix(colorspace, full_range, bits).double()
    decoded = matrix @ torch.stack([*stored, torch.ones(6)])
    torch.testing.assert_close(decoded.T, 255 * rgb, rtol=0, atol=1e-4)


def scale_with_ffmpeg(
    planes: list[Tensor],
    box: tuple[int, int, int, int],
    size: tuple[int, int],
    colorspace: str,
    full_range: bool,
    bits: int,
    siting: str,
    flip: bool,
) -> Tensor:
    """Scale the crop by FFmpeg, uint8 [height, width, 3].

    The crop is cut out here, since FFmpeg's own moves chroma at odd offsets.
    """
    x, y, w, h = box
    crops = []
    for plane, step, (rows, columns) in zip(planes, (1, 2, 2), plane_shapes(h, w), strict=True):
        crop = plane[y // step :, x // step :][:rows, :columns]
        crops.append(crop.flatten())
    samples = torch.cat(crops).view(-1, w).numpy()
    if bits == 8:
        frame = VideoFrame.from_ndarray(samples.astype(np.uint8), "yuv420p")
    else:
        frame = VideoFrame.from_ndarray(samples.astype(np.uint16), f"yuv420p{bits}le")
    # In 1/256 pixels. At an odd offset, the first sample lies a pixel before the crop.
    site_x, site_y = SITING[siting]
    right = round(256 * (site_x - x % 2))
    below = round(256 * (site_y - y % 2))
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
    filters = [graph.add(*step) for step in steps]
    graph.link_nodes(*filters, graph.add("buffersink")).configure()
    graph.vpush(frame)
    image = torch.from_numpy(graph.vpull().to_ndarray())
    return image.flip(1) if flip else image


def texture(bits: int) -> list[Tensor]:
    """Make smooth planes with edges and some noise, 180 x 241 pixels.

    Luma spans its whole range, and chroma half of it.
    """
    planes = []
    for number, (rows, columns) in enumerate(plane_shapes(180, 241)):
        y = torch.linspace(0, 1, rows)[:, None]
        x = torch.linspace(0, 1, columns)
        waves = torch.sin(18 * x + 8 * y + number) + torch.sin(46 * y * x + 2 * number)
        edges = (x - y).abs() < 0.3
        level = (waves + edges + 2) / 5 + 0.02 * torch.randn(rows, columns)
        if number > 0:
            level = 0.25 + 0.5 * level
        planes.append((level.clamp(0, 1) * (2**bits - 1)).round().long())
    return planes


# Box, size, siting, flip. Sides are even: FFmpeg stretches chroma by half a sample over odd ones.
FFMPEG_CASES = [
    # Half the size.
    ((0, 0, 240, 180), (90, 120), "left", False),
    # A little smaller.
    ((20, 16, 128, 128), (112, 112), "center", False),
    # Twice as large, at an odd offset.
    ((5, 3, 96, 140), (280, 192), "left", True),
    # A fifth.
    ((3, 2, 228, 168), (34, 46), "top left", True),
    # The same size.
    ((12, 7, 96, 96), (96, 96), "bottom", False),
]


@pytest.mark.parametrize(
    ("colorspace", "full_range", "bits"), product(LUMA_WEIGHTS, (False, True), (8, 10))
)
def test_ffmpegs_scaler_gives_the_same_within_a_gray_level(
    colorspace: str, full_range: bool, bits: int
) -> None:
    planes = texture(bits)
    # In full range, too, FFmpeg takes 1020 of 10 bits for white, where it is 1023.
    matrix = color_matrix(colorspace, full_range, 8)
    matrix[:, :3] /= 2 ** (bits - 8)
    for box, size, siting, flip in FFMPEG_CASES:
        image = crop_resize(one_clip(planes, box, matrix, siting, flip, bits), *size)[0, 0]
        expected = scale_with_ffmpeg(planes, box, size, colorspace, full_range, bits, siting, flip)
        difference = (image.int() - expected.int()).abs()
        assert difference.float().mean() <= 0.3
        # Near the border FFmpeg differs: it repeats the outermost samples outside the box, which
        # therefore count more, and at odd offsets leaves out the last sample of chroma, which
        # colors two pixels more than its own.
        margin = 3 * max(1, size[0] // box[3])
        inner = difference[margin:-margin, margin:-margin].float()
        assert inner.mean() <= 0.02
        assert inner.max() <= GRAY_LEVEL


CLIP = one_clip(noise(16, 20), (0, 0, 20, 16), IDENTITY)
# A part of the message, and the tables that are replaced.
MISUSES: dict[str, dict[str, Tensor]] = {
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
def test_misuse_is_reported_before_memory_is_read(sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        crop_resize(CLIP._replace(**MISUSES[sentence]), 8, 8)


def test_clips_without_pixels_and_unknown_colors_are_refused() -> None:
    with pytest.raises(InputError, match="0 x 8 pixels"):
        crop_resize(CLIP, 0, 8)
    sentence = "colorspace is bt2020c: give one of smpte170m, bt709, bt2020nc"
    with pytest.raises(InputError, match=sentence):
        color_matrix("bt2020c", False, 10)
    with pytest.raises(InputError, match="7 bits"):
        color_matrix("bt709", False, 7)

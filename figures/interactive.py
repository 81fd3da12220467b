"""One self-contained HTML file: the maps of clips, with sliders for frame and mask ratio."""

import base64
import io
from collections.abc import Sequence
from pathlib import Path

import jinja2
import numpy as np
from PIL import Image

from common.logging import printable
from figures.sheet import Row

HEIGHT = 160  # pixels of a frame
TEMPLATE = Path(__file__).with_name("interactive.html.jinja")


def render_page(title: str, clips: Sequence[tuple[str, dict[float, list[Row]]]], shown: float, note: str = "") -> str:
    """Return the HTML. `clips`: name of each, and its rows by mask ratio, the same ratios for all, ascending; it opens
    at the ratio `shown`."""
    content = []
    for name, rows_by_ratio in clips:
        sheets = []
        for ratio, rows in rows_by_ratio.items():
            # All frames of all rows in one image: a line per row, a column per frame.
            num_frames = len(rows[0].cells)
            cells = [[np.asarray(row.render(frame, HEIGHT)) for frame in range(num_frames)] for row in rows]
            width = cells[0][0].shape[1]
            buffer = io.BytesIO()
            Image.fromarray(np.vstack([np.hstack(line) for line in cells])).save(buffer, "WEBP", quality=85)
            image = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
            sheets.append({"mask_ratio": f"{ratio:g}", "labels": [row.label for row in rows], "image": image})
        content.append({"name": printable(name), "num_frames": num_frames, "sheets": sheets})
    # Names are the users' own: the template escapes them all, and `tojson` what would end the script from within.
    page = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined).from_string(TEMPLATE.read_text())
    start = [*clips[0][1]].index(shown)
    return page.render(title=printable(title), clips=content, start=start, width=width, height=HEIGHT, note=note)

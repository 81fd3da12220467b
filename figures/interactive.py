"""One self-contained HTML file: the maps of clips, with sliders for frame and mask ratio."""

import base64
import io
from collections.abc import Sequence
from typing import Any

import jinja2
import numpy as np
from PIL import Image

from common.logging import printable
from figures.reconstruction import Row, render_cell

CELL = 160  # pixels of a frame
PAGE = """<!doctype html>
<meta charset="utf-8">
<title>{{ title }}</title>
<style>
  body { font: 14px sans-serif; margin: 2em; }
  .maps { display: flex; flex-wrap: wrap; gap: 8px; margin: 8px 0 2em; }
  .map { width: {{ cell }}px; height: {{ cell }}px; image-rendering: pixelated; }
  figure { margin: 0; } figcaption { height: 5em; white-space: pre-line; font-size: 12px; }
  .sliders { position: sticky; top: 0; background: white; padding: 8px 0; }
  input { width: 20em; vertical-align: middle; }
</style>
<h1>{{ title }}</h1>
<p>Maps go from dark blue (low) to yellow (high), between the numbers above them. White: visible. Black in the mask:
masked.</p>
{% if note %}<p>{{ note }}</p>{% endif %}
<div class="sliders">
  <label>frame <input id="frame" type="range" min="0" value="0"> <output id="frame-value"></output></label>
  <label>mask ratio <input id="ratio" type="range" min="0" value="0"> <output id="ratio-value"></output></label>
</div>
<div id="clips"></div>
<script>
const clips = {{ clips | tojson }}, cell = {{ cell }};
function element(name, parent, properties) {
  return parent.appendChild(Object.assign(document.createElement(name), properties));
}
const frame = document.getElementById("frame"), ratio = document.getElementById("ratio");
frame.max = clips[0].num_frames - 1;
ratio.max = clips[0].sheets.length - 1;
ratio.value = ratio.max;
const views = clips.map(clip => {
  element("h2", document.getElementById("clips"), {textContent: clip.name});
  const box = element("div", document.getElementById("clips"), {className: "maps"});
  return clip.sheets[0].labels.map(() => {
    const figure = element("figure", box, {});
    return {caption: element("figcaption", figure, {}), map: element("div", figure, {className: "map"})};
  });
});
function show() {
  clips.forEach((clip, c) => {
    const sheet = clip.sheets[ratio.value];
    views[c].forEach((view, row) => {
      view.caption.textContent = sheet.labels[row];
      view.map.style.backgroundImage = `url(${sheet.image})`;
      view.map.style.backgroundPosition = `${-frame.value * cell}px ${-row * cell}px`;
    });
  });
  document.getElementById("frame-value").textContent = frame.value;
  document.getElementById("ratio-value").textContent = clips[0].sheets[ratio.value].mask_ratio;
}
frame.oninput = ratio.oninput = show;
show();
</script>
"""


def render_page(title: str, clips: Sequence[tuple[str, dict[float, list[Row]]]], note: str = "") -> str:
    """Return the HTML. `clips`: name of each, and its rows by mask ratio, the same ratios for all, ascending."""
    content = [
        {
            "name": printable(name),
            "num_frames": len(next(iter(rows_by_ratio.values()))[0].cells),
            "sheets": [_render_sheet(ratio, rows) for ratio, rows in rows_by_ratio.items()],
        }
        for name, rows_by_ratio in clips
    ]
    # Names are the users' own: the template escapes them all, and `tojson` what would end the script from within.
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    return environment.from_string(PAGE).render(title=printable(title), clips=content, cell=CELL, note=note)


def _render_sheet(mask_ratio: float, rows: list[Row]) -> dict[str, Any]:
    """Render all frames of all rows into one image: a line per row, a column per frame."""
    lines = [[np.asarray(render_cell(row, frame, CELL)) for frame in range(len(row.cells))] for row in rows]
    pixels = np.concatenate([np.concatenate(line, axis=1) for line in lines])
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "WEBP", quality=85)
    image = "data:image/webp;base64," + base64.b64encode(buffer.getvalue()).decode()
    return {"mask_ratio": f"{mask_ratio:g}", "labels": [row.label for row in rows], "image": image}

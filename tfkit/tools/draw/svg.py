"""Pictures as files: SVG, PNG, or a page that shows the values of a box under the pointer.

In an SVG, text stays text, both colour schemes are included, and no font, file or script is requested.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from xml.etree import ElementTree as ET

from tfkit.arguments import AnyPath, checked
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.common.pages import tag
from tfkit.tools.draw.canvas import FONTS, INKS, Point, Rect, Shape, ShapeGroup, Theme, Way, Words, css_rules

ROUND = 6.0
"""Radius of the corners of a line."""
TIP = 6.0
"""Length of the tip of an arrow."""
SVG = "http://www.w3.org/2000/svg"


@dataclass(frozen=True)
class Picture:
    """A drawing whose top left corner is (x, y); `title` and `description` describe it as text."""

    x: float
    y: float
    width: float
    height: float
    shapes: tuple[Shape, ...] = field(repr=False)
    title: str
    description: str

    def flat(self) -> Iterator[Shape]:
        """Yield all shapes, including those inside groups."""
        pending = list(reversed(self.shapes))
        while pending:
            shape = pending.pop()
            if isinstance(shape, ShapeGroup):
                pending += reversed(shape.shapes)
            else:
                yield shape

    def _repr_svg_(self) -> str:
        """Return the SVG that a notebook shows."""
        return to_svg(self)


def to_svg(picture: Picture, theme: Theme = "auto", *, tips: bool = False) -> str:
    """Render an SVG document; with `tips`, each box carries its tip in its attributes."""
    width, height = _number_text(math.ceil(picture.width)), _number_text(math.ceil(picture.height))
    box = f"{_number_text(picture.x)} {_number_text(picture.y)} {width} {height}"
    used = {name for shape in picture.flat() for name in getattr(shape, "look", "").split()}
    about = (tag("title", picture.title), tag("desc", picture.description), tag("style", css_rules(theme, used)))
    shapes = [element for shape in picture.shapes for element in _shape_elements(shape, tips=tips)]
    root = tag("svg", *about, *shapes, xmlns=SVG, viewBox=box, width=width, height=height, role="img")
    return ET.tostring(root, encoding="unicode") + "\n"


def inline_svg(picture: Picture) -> ET.Element:
    """Return the picture as an element of a page."""
    return ET.fromstring(to_svg(picture).replace(f' xmlns="{SVG}"', "", 1))


def _shape_elements(shape: Shape, *, tips: bool) -> Iterator[ET.Element]:
    if isinstance(shape, ShapeGroup):
        inside = [element for part in shape.shapes for element in _shape_elements(part, tips=tips)]
        if tips and shape.tip:
            tip = "\n".join(f"{name}\t{value}" for name, value in shape.tip)
            yield tag("g", *inside, class_="tipped", tabindex=0, data_title=shape.title, data_tip=tip)
        else:
            yield from inside
    elif isinstance(shape, Rect):
        size = {"x": shape.x, "y": shape.y, "width": shape.width, "height": shape.height, "rx": shape.radius}
        yield tag("rect", **{key: _number_text(value) for key, value in size.items()}, class_=shape.look)
    elif isinstance(shape, Words):
        yield _text_element(shape)
    elif isinstance(shape, Way):
        yield tag("path", d=_rounded_path(shape.points), class_=shape.look)
        if shape.arrow:
            look = shape.look.replace("line", "tip").replace(" residual", "")
            yield tag("path", d=_arrow_tip(*shape.points[-2:]), class_=look)
    else:
        x, y, r = shape.x, shape.y, shape.radius
        yield tag("circle", cx=_number_text(x), cy=_number_text(y), r=_number_text(r), class_=shape.look)
        if shape.look == "plus":
            arm = r - 3
            left, top, length = _point_text((x - arm, y)), _point_text((x, y - arm)), _number_text(2 * arm)
            cross = f"M{left}h{length}M{top}v{length}"
            yield tag("path", d=cross, class_="line")


def _text_element(words: Words) -> ET.Element:
    """Render a line of text. If all runs have the same look, it becomes the class of the entire line."""
    attributes = {"x": _number_text(words.x), "y": _number_text(words.y), "font_size": _number_text(words.size)}
    if words.anchor != "start":
        attributes["text_anchor"] = words.anchor
    looks = {run.look for run in words.line}
    common = looks.pop() if len(looks) == 1 else ""
    if look := f"{words.look} {common}".strip():
        attributes["class"] = look
    parts = [tag("tspan", run.text, class_=run.look) if run.look != common else run.text for run in words.line]
    return tag("text", *parts, **attributes)


def _rounded_path(points: tuple[Point, ...]) -> str:
    """Render a line along points, with rounded corners."""
    parts = [f"M{_point_text(points[0])}"]
    for before, corner, behind in zip(points, points[1:], points[2:], strict=False):
        radius = min(ROUND, math.dist(before, corner) / 2, math.dist(corner, behind) / 2)
        turn, on = _point_towards(corner, before, radius), _point_towards(corner, behind, radius)
        parts.append(f"L{_point_text(turn)}Q{_point_text(corner)} {_point_text(on)}")
    return "".join([*parts, f"L{_point_text(points[-1])}"])


def _arrow_tip(before: Point, end: Point) -> str:
    """Render a triangle at the end of a line."""
    base = _point_towards(end, before, TIP)
    across = ((base[1] - end[1]) * 0.5, (end[0] - base[0]) * 0.5)
    corners = (end, (base[0] + across[0], base[1] + across[1]), (base[0] - across[0], base[1] - across[1]))
    return f"M{'L'.join(map(_point_text, corners))}Z"


def _point_towards(start: Point, goal: Point, length: float) -> Point:
    distance = math.dist(start, goal) or 1.0
    return start[0] + (goal[0] - start[0]) * length / distance, start[1] + (goal[1] - start[1]) * length / distance


def _point_text(point: Point) -> str:
    return f"{_number_text(point[0])} {_number_text(point[1])}"


def _number_text(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0") if value else "0"


_SCRIPT = """
const tip = document.getElementById("tip");
function tell(box) {
  const head = document.createElement("b"), about = document.createElement("p"), rows = document.createElement("table");
  head.textContent = box.dataset.title;
  tip.replaceChildren(head, about, rows);
  for (const line of box.dataset.tip.split("\\n")) {
    const [name, value] = line.split("\\t");
    if (!name) {
      about.textContent = value;
      continue;
    }
    const row = rows.insertRow();
    row.insertCell().textContent = name;
    row.insertCell().textContent = value;
  }
  tip.hidden = false;
  const at = box.getBoundingClientRect(), size = tip.getBoundingClientRect();
  const beside = at.right + 10 + size.width < innerWidth ? at.right + 10 : Math.max(4, at.left - size.width - 10);
  tip.style.left = `${beside + scrollX}px`;
  tip.style.top = `${Math.max(4, Math.min(at.top, innerHeight - size.height - 4)) + scrollY}px`;
}
for (const box of document.querySelectorAll(".tipped")) {
  for (const event of ["pointerenter", "focus"]) box.addEventListener(event, () => tell(box));
  for (const event of ["pointerleave", "blur"]) box.addEventListener(event, () => { tip.hidden = true; });
}
"""


def to_html(picture: Picture, theme: Theme = "auto") -> str:
    """Render a page that needs no other file."""
    light, dark = (_css_rules(which) for which in (0, 1))
    rules = f"{light}@media(prefers-color-scheme:dark){{{dark}}}" if theme == "auto" else (light, dark)[theme == "dark"]
    svg = to_svg(picture, theme, tips=True)
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width">
<title>{escape(picture.title)}</title>
<style>
body{{margin:24px;font:13px {FONTS}}}
svg{{display:block;margin:auto;max-width:100%;height:auto}}
.tipped{{outline:none}}.tipped:hover>rect:first-of-type,.tipped:focus>rect:first-of-type{{stroke-width:2.4}}
#tip{{position:absolute;max-width:280px;font-size:12px;padding:10px 12px;border:1px solid;border-radius:8px}}
#tip{{pointer-events:none}}#tip p{{margin:2px 0 6px}}
#tip td{{padding:0 12px 0 0;vertical-align:top;overflow-wrap:anywhere}}
{rules}
</style>
<body>
{svg}<div id="tip" hidden></div>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _css_rules(which: int) -> str:
    ink = {name: pair[which] for name, pair in INKS.items()}
    return (
        f"body{{background:{ink['frame']};color:{ink['text']}}}"
        f"#tip{{background:{ink['page']};border-color:{ink['edge']}}}#tip td:first-child{{color:{ink['muted']}}}"
    )


ZOOM = 2
"""Pixels of a PNG for each pixel of the picture."""


def to_png(picture: Picture, theme: Theme = "auto") -> bytes:
    """Render a PNG at twice the picture's size, in light colours unless `theme` is dark. No system font is needed.

    Raises:
        SpecError: a required package is not installed.
    """
    try:
        import matplotlib
        import resvg_py
    except ImportError as error:
        message = f"a PNG needs `{error.name}`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[draw]", or write an SVG')) from error
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    png: bytes = resvg_py.svg_to_bytes(
        svg_string=to_svg(picture, "light" if theme == "auto" else theme),
        skip_system_fonts=True,
        font_files=[str(fonts / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf")],
        sans_serif_family="DejaVu Sans",
        font_family="DejaVu Sans",
        zoom=ZOOM,
    )
    return bytes(png)


FORMATS: dict[str, Callable[[Picture, Theme], str | bytes]] = {".svg": to_svg, ".png": to_png, ".html": to_html}
"""The function that renders each format, by the suffix of the file."""


@checked
def write_picture(picture: Picture, path: AnyPath, theme: Theme = "auto") -> None:
    """Write a picture in the format of the suffix of `path`: .svg, .png or .html.

    Raises:
        ValueError: `path` has a different suffix.
        SpecError: the file cannot be written. It is never written partially, even after an interrupt or on a full disk.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"the suffix of a picture must be {', '.join(FORMATS)}; got {path.suffix or 'none'}")
    write_file(path, FORMATS[path.suffix](picture, theme))

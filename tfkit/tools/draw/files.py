"""A picture as a file: SVG, PNG, or a page that shows more under the pointer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tfkit.arguments import AnyPath, checked
from tfkit.errors import Diagnostic, SpecError
from tfkit.tools.common.atomic_files import write_file
from tfkit.tools.draw.page import to_html
from tfkit.tools.draw.style import Theme
from tfkit.tools.draw.svg import Picture, to_svg

ZOOM = 2
"""Pixels of a PNG for each pixel of the picture."""


def to_png(picture: Picture, theme: Theme = "auto") -> bytes:
    """A PNG of twice the picture's size, in light colours unless `theme` is dark. No system font is needed.

    Raises:
        SpecError: a required package is not installed.
    """
    try:
        import matplotlib
        import resvg_py
    except ImportError as missing:
        message = f"a PNG needs `{missing.name}`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[draw]", or write an SVG')) from missing
    fonts = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
    made: bytes = resvg_py.svg_to_bytes(
        svg_string=to_svg(picture, "light" if theme == "auto" else theme),
        skip_system_fonts=True,
        font_files=[str(fonts / name) for name in ("DejaVuSans.ttf", "DejaVuSans-Bold.ttf")],
        sans_serif_family="DejaVu Sans",
        font_family="DejaVu Sans",
        zoom=ZOOM,
    )
    return bytes(made)


FORMATS: dict[str, Callable[[Picture, Theme], str | bytes]] = {".svg": to_svg, ".png": to_png, ".html": to_html}
"""The formats, by the ending of the file's name."""


@checked
def write(picture: Picture, path: AnyPath, theme: Theme = "auto") -> None:
    """Write a picture in the format that the ending of `path` says: .svg, .png or .html.

    Raises:
        ValueError: another ending.
        SpecError: it cannot be written; an interrupt or a full disk leaves no half picture.
    """
    path = Path(path)
    if path.suffix not in FORMATS:
        raise ValueError(f"a picture is {', '.join(FORMATS)}, not {path.suffix or 'nameless'}")
    write_file(path, FORMATS[path.suffix](picture, theme))

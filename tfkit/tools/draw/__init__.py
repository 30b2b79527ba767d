"""Pictures of models, as in papers: bottom to top, with every norm and every residual path in its place.

Data flows one way: graph -> scene -> shapes -> file.

    model.py, stack.py     the contents: boxes, notes and wires, without places (`scene.py`); texts from `notes.py`
    compare.py             the differences between two scenes
    picture.py             places: `panel.py` for a model, `nodes.py`, `layers.py`, `boxes.py` inside it
    svg.py, page.py        the shapes (`shapes.py`) as text, in the colours of `style.py`
    files.py               as a file
"""

from tfkit.tools.draw.files import to_png, write
from tfkit.tools.draw.model import scene_of
from tfkit.tools.draw.page import to_html
from tfkit.tools.draw.picture import draw, picture_of
from tfkit.tools.draw.shapes import Picture
from tfkit.tools.draw.style import Theme
from tfkit.tools.draw.svg import to_svg

__all__ = ["Picture", "Theme", "draw", "picture_of", "scene_of", "to_html", "to_png", "to_svg", "write"]

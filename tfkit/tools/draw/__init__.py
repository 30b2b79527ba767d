"""Pictures of models, as in the papers: bottom to top, with every norm and every residual path where it is.

Data flows one way: graph -> scene -> shapes -> file.

    model.py, stack.py     what is shown: boxes, notes and wires, without places (`scene.py`); texts from `facts.py`
    compare.py             what differs between two scenes
    picture.py             places: `panel.py` for a model, `nodes.py`, `layers.py`, `boxes.py` for its parts
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

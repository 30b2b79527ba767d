"""Pictures of models, as in papers: bottom to top, with every norm and every residual path in its place.

Data flows one way: graph -> scene -> shapes -> file.

    model.py, stack.py     the contents: boxes, notes and wires, without places (`scene.py`); texts from `notes.py`
    compare.py             the differences between two scenes
    picture.py             places: `panel.py` for a model, `nodes.py`, `layers.py`, `boxes.py` inside it
    svg.py, page.py        the shapes (`shapes.py`) as text, in the colours of `style.py`
    files.py               as a file
"""

"""Pictures of models, as in papers: bottom to top, with every norm and every residual path.

Data flows one way: graph -> scene -> shapes -> file.

    model_scene.py, stack_scene.py   a graph as a scene (`scene.py`): boxes, notes and wires without coordinates
    picture.py                       coordinates of columns and wires; `layout.py` places the contents of nodes
    svg.py                           the shapes on a canvas (`canvas.py`) as SVG, PNG or a page
"""

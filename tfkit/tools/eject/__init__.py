"""A built model as one readable file of plain PyTorch.

The file contains the code that tfkit runs. Every `forward` of the model is specialised to its configuration
(`specialise.py`), dead code is removed (`cleanup.py`), equal modules become a single class (`classes.py`), and numbers
keep their names in the spec (`config.py`). Components need no support for this.
"""

"""A built model as one readable file of plain PyTorch.

The code that runs is the code that is written out: every `forward` of the model is read, all that its configuration
decides is decided once (`specialise.py`), dead code is dropped (`cleanup.py`), equal modules become one class
(`classes.py`), and numbers keep the names that the spec gave them (`config.py`). Components need not know about it.
"""

"""A built model as one readable file of plain PyTorch.

The code that runs is the code that is written out: every `forward` of the model is read, what its configuration decides
is decided once (`specialise.py`), what is then dead falls away (`tidy.py`), modules that are alike become one class
(`classes.py`), and numbers keep the names that the spec gave them (`symbols.py`). No component knows of it.
"""

from tfkit.tools.eject.alone import Alone
from tfkit.tools.eject.check import Proof, check
from tfkit.tools.eject.write import eject

__all__ = ["Alone", "Proof", "check", "eject"]

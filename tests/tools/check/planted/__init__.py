"""Bugs of other projects, planted by replacing a method: each breaks a property, and the test names it.

`where` is the public report of such a bug, or a word for a mistake that is easily made.
"""

from __future__ import annotations

# isort: off
# in the order of the table in docs/check_bugs.md
from . import masks as masks
from . import positions as positions
from . import caches as caches
from . import attention as attention
from . import layers as layers
from . import states as states
from . import training as training

# isort: on
from .bug import BUGS as BUGS
from .bug import Bug as Bug

"""Several names in one: `[q k v]_proj` stands for `q_proj`, `k_proj` and `v_proj`."""

from __future__ import annotations

import re
from itertools import product

from tfkit.errors import Invalid, quoted

_WORDS = re.compile(r"\[([^\[\]]*)\]")


def expanded(name: str) -> list[str]:
    """Return the names that `[q k v]` in a name stands for, in order; raise `Invalid` for unclosed brackets."""
    segments = _WORDS.split(name)
    if any(bracket in segment for segment in segments[::2] for bracket in "[]") or any(
        not w.split() for w in segments[1::2]
    ):
        raise Invalid("", f"{quoted(name)} has brackets without words, or an unmatched one", help="write `[q k v]`")
    choices = [segment.split() if index % 2 else [segment] for index, segment in enumerate(segments)]
    return ["".join(chosen) for chosen in product(*choices)]

"""A valid text to break, and the error of an invalid text."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tfkit.errors import SpecError

GOOD = """\
# a comment
tfkit: 1
name: 'vaswani base'
d_model: 512
dropout: 1e-1
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source, scale: sqrt_d_model}
  encoder: &stack   # shared
    block: encoder
    attention: {kind: mha, n_heads: 8}
    pattern:
    - local*5
    - global
  decoder: {<<: *stack, block: decoder, "memory": encoder}
notes: |
  two
  lines
"""


def failure(act: Callable[[], object]) -> SpecError:
    with pytest.raises(SpecError) as caught:
        act()
    return caught.value

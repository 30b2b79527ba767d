"""A field of the config.json of ConvBERT: the ratio by which it reduces the number of heads."""

from __future__ import annotations

from typing import Literal

import tfkit
from tfkit import FieldConfig, Reading, Writing


class HeadRatioConfig(FieldConfig):
    """The divisor of the number of heads: `{head_ratio: encoder.attention.n_heads, of: num_attention_heads}`.

    The quotient is rounded down, to at least 1. The number of heads is an earlier field.
    """

    kind: Literal["head_ratio"] = "head_ratio"
    head_ratio: str
    """The path of the number of heads."""
    of: str
    """The field with the number of heads before the division."""

    def read(self, name: str, file: Reading) -> None:
        ratio, heads = (file.value(field) for field in (name, self.of))
        for field, value in ((name, ratio), (self.of, heads)):
            if type(value) is not int or value < 1:
                raise tfkit.Invalid("", f"`{field}` must be a positive integer; got `{value}`")
        file.put(self.head_ratio, max(1, heads // ratio))

    def write(self, name: str, file: Writing) -> None:
        ratio = file.default(name)
        file.put(self.of, file.value(self.head_ratio) * ratio)
        file.put(name, ratio)

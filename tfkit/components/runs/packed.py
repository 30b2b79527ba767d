"""Several documents in a row that do not see each other (https://arxiv.org/abs/2107.02027, section 3.2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from tfkit.component import IGNORED, Batch, Data, Examples, Ids
from tfkit.components.runs.over import OverConfig, OverData
from tfkit.components.runs.tokenizers import id_of
from tfkit.errors import Invalid


class PackedConfig(OverConfig):
    """Other data, the documents of whose rows are kept apart: each is as if the row had nothing else.

    No token reads one of another document, positions begin anew in each, and the last token of one predicts nothing.
    Where a row ends, a document is cut.
    """

    kind: Literal["packed"] = "packed"

    separator: str | Annotated[int, Field(ge=0)]
    """The token that ends a document: its text, or its id."""

    def over(self, of: Data) -> Data:
        separator = id_of(self.separator, of, "separator") if isinstance(self.separator, str) else self.separator
        if separator >= of.vocab_size:
            message = f"{separator} is not a token: the data has {of.vocab_size:,} tokens, 0 to {of.vocab_size - 1}"
            raise Invalid("separator", message)
        return OverData(of, of.vocab_size, lambda split, examples: Packed(examples, separator))


class Packed:
    """Examples that know the documents of each row."""

    def __init__(self, of: Examples, separator: int) -> None:
        self._of, self._separator = of, separator

    def __len__(self) -> int:
        return len(self._of)

    def batch(self, indices: Ids) -> Batch:
        seen = self._of.batch(indices)
        ((_, tokens),) = seen.inputs.items()
        ends = tokens == self._separator
        documents = np.cumsum(ends, axis=1) - ends
        return replace(seen, targets=np.where(ends, IGNORED, seen.targets), documents=documents)

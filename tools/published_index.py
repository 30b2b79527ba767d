"""The names in the index of a published folder, in the short form of `tests/published/index`.

`python tools/published_index.py model.safetensors.index.json "a copy, NAME at COMMIT" bfloat16 > llama2_7b.yaml`
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

Part = tuple[str, ...]
"""The alternatives for a part of a name, between two dots."""


def short_form(names: Iterable[str]) -> list[str]:
    """Return entries that stand for these names: runs of numbers as `{0-31}`, other alternatives as `[q_proj k_proj]`.

    Names that differ in a single part become one entry, first those that differ in a number.
    """
    rows = [tuple((part,) for part in name.split(".")) for name in sorted(names, key=_sorting)]
    length = max(map(len, rows), default=0)
    for position in range(length):
        rows = _merged(rows, position, lambda part: part[0].isdigit())
    for position in reversed(range(length)):
        rows = _merged(rows, position, lambda part: not part[0].isdigit())
    return [".".join(map(_text, row)) for row in rows]


def _sorting(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in name.split(".")]


def _merged(rows: list[tuple[Part, ...]], position: int, is_merged: Callable[[Part], bool]) -> list[tuple[Part, ...]]:
    """Merge the rows that are equal except for the part at this position."""
    parts: dict[tuple[tuple[Part, ...], tuple[Part, ...], bool], Part] = {}
    for number, row in enumerate(rows):
        apart = position < len(row) and is_merged(row[position])
        key = (row[:position], row[position + 1 :], True) if apart else (row, ((str(number),),), False)
        parts[key] = (*parts.get(key, ()), *row[position]) if apart else ()
    return [(*before, part, *after) if merged else before for (before, after, merged), part in parts.items()]


def _text(part: Part) -> str:
    if len(part) == 1:
        return part[0]
    if all(word.isdigit() for word in part) and [*map(int, part)] == [*range(int(part[0]), int(part[-1]) + 1)]:
        return f"{{{part[0]}-{part[-1]}}}"
    return f"[{' '.join(part)}]"


def main() -> None:
    """Print the short form of an index, with its source, the dtype of the folder and the size of its tensors."""
    file, source, dtype = sys.argv[1:]
    index = json.loads(Path(file).read_text(encoding="utf-8"))
    size = index.get("metadata", {}).get("total_size")
    print(f"source: {Path(file).name} of {source}\ndtype: {dtype}")
    print(f"total_size: {int(size) if size else 'null'}\ntensors:")
    for entry in short_form(index["weight_map"]):
        print(f'  - "{entry}"')


if __name__ == "__main__":
    main()

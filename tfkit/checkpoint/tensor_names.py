"""Names of tensors with holes and alternatives: `decoder.layers.{i}.attention.project.[q k v]`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from itertools import takewhile
from typing import Any

from tfkit.errors import number_ranges

_HOLE = re.compile(r"\{(\w+)\}")
NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
"""Matches a segment of a name that is a number, such as the index of a layer."""


def hole_names(name: str) -> list[str]:
    """Return the holes of a name, in order."""
    return _HOLE.findall(name)


def filled_name(name: str, numbers: Mapping[str, int]) -> str:
    """Fill the holes of a name with numbers; holes without a number remain."""
    return _HOLE.sub(lambda hole: str(numbers.get(hole[1], hole[0])), name)


def name_and_numbers(name: str) -> tuple[str, list[int]]:
    """Replace each number in a name by `{}`; return the name and the numbers."""
    return NUMBER.sub("{}", name), [int(number) for number in NUMBER.findall(name)]


def with_nameless_holes(name: str) -> str:
    """Replace each hole in a name by `{}`, as in the result of `name_and_numbers`."""
    return _HOLE.sub("{}", name)


def name_matcher(names: Iterable[str]) -> re.Pattern[str]:
    """Return a regular expression for names, in which `{i}` is a number and `*` any text."""
    texts = [re.escape(name) for name in names]
    texts = [re.sub(r"\\\{\w+\\\}", r"\\d+", text).replace(r"\*", ".*") for text in texts]
    return re.compile("|".join(texts) if texts else r"(?!)")


def enclosing_modules(name: str) -> Iterator[str]:
    """Yield the paths of the modules around a tensor, innermost first."""
    while name := name.rpartition(".")[0]:
        yield name


def collapsed_layers(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Collapse the names of layers with equal values into ranges: `decoder.layers.0-11.ffn.up.weight`."""
    groups: dict[tuple[str, Any], list[int]] = {}
    for name, value in values.items():
        number = NUMBER.search(name)
        key = f"{name[: number.start()]}*{name[number.end() :]}" if number else name
        groups.setdefault((key, value), []).append(int(number[0]) if number else 0)
    return [
        (key.replace("*", number_ranges(sorted(numbers)).replace(" ", "")), value)
        for (key, value), numbers in groups.items()
    ]


def counts_by_module(names: Iterable[str]) -> dict[str, int]:
    """Return the numbers of tensors in the modules below the innermost module that contains all of the tensors."""
    paths = [name.split(".") for name in names]
    depth = len(list(takewhile(lambda parts: len(set(parts)) == 1, zip(*paths, strict=False))))
    return dict(Counter(".".join(path[: depth + 1]) for path in paths))

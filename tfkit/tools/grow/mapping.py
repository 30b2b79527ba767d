"""The `weights` of a run that starts from a grown model: a map that is as short as its weights allow."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from tfkit.checkpoint.selection import is_match, matches_any
from tfkit.tools.grow.axes import pattern_text
from tfkit.tools.grow.rules import TensorMap

_LAYER = re.compile(r"(?P<stack>[^.]+)\.layers\.(?P<number>\d+)\.(?P<rest>.+)")
Source = tuple[str, str | None]
"""The name of a weight of the old model, and a pattern; the name "0" stands for zeros."""


def weights_entry(maps: Mapping[str, TensorMap], old: Collection[str]) -> dict[str, Any]:
    """Return the `map`, `missing` and `unused` that fill a model. Raise NestedGrowth if a growth has no pattern."""
    sources: dict[str, Source] = {}
    for name, entry in maps.items():
        if entry.source is not None:
            text = None if entry.is_zero else pattern_text(entry.axes, inserted=entry.inserted, divisor=entry.divisor)
            sources[name] = ("0" if entry.is_zero else entry.source, text)
    read = {source for source, _ in sources.values()}
    values = {
        "map": _with_brackets(dict(_entries(sources))),
        "missing": _patterns([name for name, entry in maps.items() if entry.source is None]),
        "unused": _patterns([name for name in old if name not in read]),
    }
    return {name: value for name, value in values.items() if value}


def _patterns(names: list[str]) -> list[str]:
    """Return patterns for names, with a pattern for all layers."""
    return list(dict.fromkeys(re.sub(r"\.layers\.\d+\.", ".layers.*.", name) for name in names))


def shortest_patterns(names: Collection[str], excluded: Collection[str]) -> tuple[str, ...]:
    """Return patterns that match `names`, and none of `excluded`."""
    patterns: list[str] = []
    for name in names:
        if not matches_any(name, patterns):
            match = _LAYER.fullmatch(name)
            layers = [] if match is None else [f"{match['stack']}.layers.{number}" for number in ("*", match["number"])]
            candidates = ("*", *layers, name)
            patterns.append(next(text for text in candidates if not any(is_match(other, text) for other in excluded)))
    return tuple(patterns)


def _entries(sources: Mapping[str, Source]) -> Iterator[tuple[str, Any]]:
    stacks: dict[str, dict[str, dict[int, Source]]] = {}
    for name, source in sources.items():
        match = _LAYER.fullmatch(name)
        if match is not None:
            rests = stacks.setdefault(match["stack"], {})
            rests.setdefault(match["rest"], {})[int(match["number"])] = source
        elif source != (name, None):
            yield name, _value(source)
    for stack, rests in stacks.items():
        yield from _stack_entries(stack, rests)


def _stack_entries(stack: str, rests: Mapping[str, Mapping[int, Source]]) -> Iterator[tuple[str, Any]]:
    """Yield the entries of the layers of a stack: first the old layer of each layer, then the weights that change."""
    copied, plain = _copied_layers(stack, rests), set[int]()
    groups: dict[tuple[str, str, str | None], dict[int, int]] = {}
    for rest, layers in rests.items():
        name = f"{stack}.layers.{{}}.{rest}"
        for number, (source, pattern) in layers.items():
            match = _LAYER.fullmatch(source)
            key = source if match is None else f"{match['stack']}.layers.{{}}.{match['rest']}"
            layer = number if match is None else int(match["number"])
            if (key, pattern, layer) == (name, None, copied[number]):
                plain.add(number)
            else:
                groups.setdefault((name, key, pattern), {})[number] = layer
    if any(copied[number] != number for number in plain):
        is_all = _expression(copied) is not None
        moved = {number: layer for number, layer in copied.items() if is_all or (number != layer and number in plain)}
        yield _keyed(f"{stack}.layers.{{}}", f"{stack}.layers.{{}}", moved, None, is_all=is_all)
    for (name, key, pattern), numbers in groups.items():
        yield _keyed(name, key, numbers, pattern, is_all=numbers.keys() == copied.keys())


def _copied_layers(stack: str, rests: Mapping[str, Mapping[int, Source]]) -> dict[int, int]:
    """Return for each layer the old layer with the same weights; the layer itself if there is none."""
    layers = {number: number for numbers in rests.values() for number in numbers}
    for rest, numbers in rests.items():
        for number, (source, _) in numbers.items():
            match = _LAYER.fullmatch(source)
            if match is not None and match["stack"] == stack and match["rest"] == rest:
                layers[number] = int(match["number"])
    return dict(sorted(layers.items()))


def _keyed(name: str, source: str, numbers: Mapping[int, int], pattern: str | None, *, is_all: bool) -> tuple[str, Any]:
    """Return an entry for some layers, with arithmetic if it gives the old layer of each layer."""
    braces = _expression(numbers) if is_all else None
    words, layers = ("{i}", braces) if braces else (_bracketed(numbers), _bracketed(numbers.values()))
    return name.replace("{}", words), _value((source.replace("{}", layers), pattern))


def _bracketed(numbers: Collection[int]) -> str:
    words = " ".join(map(str, numbers))
    return f"[{words}]" if len(numbers) > 1 else words


def _expression(numbers: Mapping[int, int]) -> str | None:
    """Return braces for the old number of each layer; None if simple arithmetic does not give it."""
    n, times = len(numbers), len(numbers) // len(set(numbers.values()))
    candidates = [("{i}", list(range(n))), (f"{{i // {times}}}", [i // times for i in range(n)])]
    for period in range(2, n // times + 1):
        block = period * times
        text = f"{{i // {block} * {period} + i % {period}}}"
        candidates.append((text, [i // block * period + i % period for i in range(n)]))
    return next((text for text, layers in candidates if numbers == dict(enumerate(layers))), None)


def _with_brackets(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Join the entries of parts with the same pattern, such as `project.[k v].weight`."""
    groups: dict[tuple[str, str, str], list[tuple[str, str]]] = {}
    for key, value in entries.items():
        source, pattern = next(iter(value.items())) if isinstance(value, dict) else (str(value), "")
        segments, source_segments = key.split("."), source.split(".")
        has_words = len(segments) > 2 and len(source_segments) > 2
        words = (segments.pop(-2), source_segments.pop(-2)) if has_words else ("", "")
        groups.setdefault((".".join(segments), ".".join(source_segments), pattern), []).append(words)
    result: dict[str, Any] = {}
    for (name, source, pattern), pairs in groups.items():
        key, text = (_with_words(path, [pair[side] for pair in pairs]) for side, path in enumerate((name, source)))
        result[key] = {text: pattern} if pattern else 0 if text == "0" else text
    return result


def _with_words(path: str, words: Sequence[str]) -> str:
    """Return a path with words before its last segment."""
    start, _, last = path.rpartition(".")
    word = words[0] if len(words) == 1 else f"[{' '.join(words)}]"
    return f"{start}.{word}.{last}" if word else path


def _value(source: Source) -> Any:
    name, pattern = source
    if name == "0":
        return 0
    return name if pattern is None else {name: pattern}

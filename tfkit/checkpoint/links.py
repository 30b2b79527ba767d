"""Derives the links between a model and a file from the family of its spec."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import product

import torch
from torch import Tensor

from tfkit.checkpoint.computed import Expected, tensor_function, writing_function
from tfkit.checkpoint.pattern import Pattern, PatternError
from tfkit.checkpoint.tensor_names import (
    collapsed_layers,
    enclosing_modules,
    filled_name,
    hole_names,
    name_and_numbers,
    name_matcher,
    with_nameless_holes,
)
from tfkit.checkpoint.weight_map import Link, WeightMap, tensor_locations_of
from tfkit.component import Component
from tfkit.errors import Diagnostic, Invalid, Span, SpecError, quoted
from tfkit.spec.families import FamilyConfig, expanded_names

_SIZE = re.compile(r"(\w+)=(\d+)")
"""A size in a pattern that cannot be inferred from the tensors or the component: `[q=1 k=1 v=1]`."""


def published_map(model: torch.fx.GraphModule, family: FamilyConfig) -> WeightMap:
    """Return the weight map of a model by its family.

    Raises:
        SpecError: a tensor of the model has no entry, or two; or an entry is malformed.
    """
    links = FamilyLinks(model, family)
    if links.errors:
        raise links.errors[0]
    return links.map


class FamilyLinks:
    """The links that a family has for a model, which may have components that the family does not describe.

    Attributes:
        map: the weight map, without the tensors that have no entry.
        errors: an error for the tensors without an entry, and for each entry that does not fit the model.
    """

    def __init__(self, model: torch.fx.GraphModule, family: FamilyConfig) -> None:
        self.model = model
        self.graph = model.meta["graph"]
        self.components = model.meta["components"]
        self.family = family
        self.state = model.state_dict()
        self.locations = tensor_locations_of(model)
        self.entries: dict[str, list[tuple[str, int]]] = {}
        self.entry_names: dict[str, list[str]] = {}
        for key in family.tensors:
            self.entry_names[key] = self._expanded(key, key)
            for index, name in enumerate(self.entry_names[key]):
                entries = self.entries.setdefault(with_nameless_holes(name), [])
                for rival, _ in entries:
                    if len(self.entry_names[rival]) == len(self.entry_names[key]):
                        raise self._invalid_entry(
                            key, f"two entries name {quoted(name)}", f"the other is {quoted(rival)}"
                        )
                entries.append((key, index))
        self.errors: list[SpecError] = []
        self.map = self._map()

    def _map(self) -> WeightMap:
        links: list[Link] = []
        lost: list[str] = []
        grouped: dict[tuple[str, str, tuple[int, ...]], dict[int, str]] = {}
        for name in self.locations:
            entry = self._entry(name)
            if entry is None:
                lost.append(name)
                continue
            key, index, leaf = entry
            numbers = tuple(name_and_numbers(name)[1])
            if isinstance(self.family.tensors[key], str):
                with self._collecting():
                    links += self._links(key, [name], [self._files(key)[index]], leaf, numbers)
            else:
                grouped.setdefault((key, leaf, numbers), {})[index] = name
        if lost:
            self.errors.insert(0, self._without_entry(lost))
        for (key, leaf, numbers), names in grouped.items():
            with self._collecting():
                if len(names) < len(self.entry_names[key]):
                    has = ", ".join(quoted(name) for name in names.values())
                    raise self._invalid_entry(
                        key, "the pattern needs tensors that the model does not have", f"it has {has}"
                    )
                links += self._links(key, [names[i] for i in range(len(names))], self._files(key), leaf, numbers)
        family = self.family
        constants = self._constants([name for link in links for name in link.file])
        fields = tuple(links), self.locations, family.prefix, family.body, family.copies, family.ignored, family.older
        return WeightMap(*fields, constants, family.zeros, self._computed(), self._written())

    @contextmanager
    def _collecting(self) -> Iterator[None]:
        try:
            yield
        except SpecError as error:
            self.errors.append(error)

    def _written(self) -> dict[str, Callable[[], Tensor]]:
        """Return the functions for computed tensors that are written, by their names in the file."""
        functions = ((name, writing_function(self.model, name, text)) for name, text in self.family.computed.items())
        return {name: function for name, function in functions if function is not None}

    def _computed(self) -> dict[str, Expected]:
        """Return the functions for computed tensors that are compared, by their names in the file."""
        functions: dict[str, Expected] = {}
        for name, text in self.family.computed.items():
            try:
                functions[name] = tensor_function(self.model, text)
            except Invalid as error:
                span = self._span("extra", name)
                path = f"checkpoint.extra.{name}"
                self.errors.append(SpecError(Diagnostic(str(error), span, path, tuple(error.notes))))
        return functions

    def _constants(self, names: Sequence[str]) -> dict[str, float]:
        """Return the constant numbers of the file by their full names for this model."""
        constants: dict[str, float] = {}
        for name, value in self.family.constants.items():
            layer = hole_names(name)
            siblings = name_matcher(
                [f"{name.rpartition('.')[0]}.*"]
            )  # with a different activation, there are no constants
            numbers = {
                tuple(name_and_numbers(sibling)[1][: len(layer)]) for sibling in names if siblings.fullmatch(sibling)
            }
            constants |= {
                filled_name(name, dict(zip(layer, indices, strict=True))): value
                for indices in (numbers if layer else [()])
            }
        return constants

    def _entry(self, name: str) -> tuple[str, int, str] | None:
        """Return the entry of a tensor, the index of its name in that entry, and the suffix of the tensor's name."""
        stem, _, leaf = name.rpartition(".")
        for text, rest in ((name, ""), (stem, f".{leaf}")):
            for stripped in (text, name_and_numbers(text)[0]):
                if stripped in self.entries:
                    return *self._widest(self.entries[stripped], name, rest), rest
        return None

    def _widest(self, entries: Sequence[tuple[str, int]], name: str, leaf: str) -> tuple[str, int]:
        """Return the entry with the most names, preferring entries whose names the model has."""
        numbers = name_and_numbers(name)[1]

        def missing(entry: tuple[str, int]) -> bool:
            names = self.entry_names[entry[0]]
            filling = dict(zip(hole_names(names[entry[1]]), numbers, strict=False))
            return any(filled_name(pattern, filling) + leaf not in self.locations for pattern in names)

        return min(entries, key=lambda entry: (missing(entry), -len(self.entry_names[entry[0]])))

    def _files(self, key: str) -> list[str]:
        entry = self.family.tensors[key]
        text = entry if isinstance(entry, str) else next(iter(entry))
        files = [self.family.in_file(name) for name in self._expanded(text, key)]
        if isinstance(entry, str) and len(files) != len(self.entry_names[key]):
            count = len(self.entry_names[key])
            message = f"{count} tensors of the model cannot be {len(files)} of the file without a pattern"
            raise self._invalid_entry(key, message)
        return files

    def _links(
        self, key: str, tensors: Sequence[str], files: Sequence[str], leaf: str, numbers: Sequence[int]
    ) -> Iterator[Link]:
        """Yield the links of an entry for a layer.

        If the names in the file have additional holes, yield a link for each index.
        """
        filling = dict(zip(hole_names(self.entry_names[key][0]), numbers, strict=False))
        names = [filled_name(name, filling) + leaf for name in files]
        open_ = list(dict.fromkeys(hole for name in names for hole in hole_names(name)))
        shape = self.locations[tensors[0]].view(self.state).shape
        if len(open_) >= len(shape):
            raise self._invalid_entry(key, f"{quoted(names[0])} has more holes than {quoted(tensors[0])} has axes")
        pattern, sizes = self._pattern(key, tensors[0], len(shape) - len(open_))
        for index in product(*map(range, shape[: len(open_)])):
            at = dict(zip(open_, index, strict=True))
            file = tuple(filled_name(name, at) for name in names)
            yield Link(tuple(tensors), file, index, pattern, sizes)

    def _pattern(self, key: str, name: str, rank: int) -> tuple[Pattern | None, dict[str, int]]:
        """Return the pattern of an entry for tensors with `rank` axes, and the known sizes of its names."""
        entry = self.family.tensors[key]
        if isinstance(entry, str):
            return None, {}
        try:
            return pattern_of(next(iter(entry.values())), rank, name, self.components)
        except PatternError as error:
            raise self._invalid_entry(key, error.message, *error.notes, help=error.help) from None

    def _expanded(self, name: str, key: str) -> list[str]:
        try:
            return expanded_names(name)
        except Invalid as error:
            raise self._invalid_entry(key, str(error), help=error.help) from None

    def _without_entry(self, lost: Sequence[str]) -> SpecError:
        notes = tuple(f"{name} {list(shape)}" for name, shape in collapsed_layers({n: self._shape(n) for n in lost}))
        message = "the family has no entry for tensors of the model"
        help = "write each tensor under `tensors`, with its name in the file"
        return SpecError(Diagnostic(message, self._span("tensors"), "checkpoint.tensors", notes, help))

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.locations[name].view(self.state).shape)

    def _invalid_entry(self, key: str, message: str, *notes: str, help: str | None = None) -> SpecError:
        span = self._span("tensors", key)
        return SpecError(Diagnostic(message, span, f"checkpoint.tensors.{key}", notes, help))

    def _span(self, *path: str) -> Span | None:
        return self.graph.spec.provenance.span(("checkpoint", *path))


def pattern_of(
    text: str, rank: int, name: str, components: Mapping[str, Component], *, resizing: bool = False
) -> tuple[Pattern, dict[str, int]]:
    """Return the pattern for a tensor of the model with `rank` axes, and the known sizes of its names.

    Sizes come from the text, or from the components around the tensor. Raises PatternError.
    """
    pattern = _parsed_pattern(_SIZE.sub(r"\1", text), rank, resizing)
    sizes: dict[str, int] = {}
    for path in enclosing_modules(name):
        if path in components:
            sizes = {**components[path].pattern_sizes, **sizes}
    sizes = {letter: size for letter, size in sizes.items() if letter in pattern.names}
    return pattern, {**sizes, **{letter: int(size) for letter, size in _SIZE.findall(text)}}


@cache
def _parsed_pattern(text: str, rank: int, resizing: bool) -> Pattern:
    """Parse the pattern for a tensor of the model with `rank` axes: `...` expands to the unnamed axes."""
    named = len(Pattern.parse(text.replace("...", "_"), resizing=resizing).target[0].items)
    if "..." in text:
        text = text.replace("...", " ".join(f"_{i}" for i in range(rank - named + 1)))
    return Pattern.parse(text, resizing=resizing)

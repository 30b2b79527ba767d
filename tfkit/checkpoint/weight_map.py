"""The weight map: links between the tensors of a file and of a model, for loading and for saving.

Each link connects tensors of the model, or parts of them (the queries of a fused projection, an expert), with tensors
of the file. Its pattern rearranges the tensors of the file for loading, and the inverse of the pattern the tensors of
the model for saving. Both copy each value once. Published weights are saved to a single file, or to shards with an
index if the file would be large.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from tfkit.checkpoint.computed import Expected, is_close
from tfkit.checkpoint.files import TensorFiles, check_finite
from tfkit.checkpoint.pattern import Pattern
from tfkit.checkpoint.tensor_names import name_and_numbers, name_matcher
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.nn import StackedLinear
from tfkit.nn.spread import outlines, process_of, rows_of
from tfkit.spec.folder import INDEX, WEIGHTS

Value = TypeVar("Value")
MAX_SHARD = 5 * 10**9
"""Maximum size of a file in bytes, unless a single tensor is larger."""
SHARD = re.compile(r"model-\d{5}-of-\d{5}\.safetensors")
MAPPING_HELP = "map it under `tensors`, to a tensor of the graph"


@dataclass(frozen=True)
class TensorLocation:
    """The location of a model's tensor: a parameter, or the range of a part in a fused parameter."""

    parameter: str
    dim: int = 0
    start: int = 0
    length: int | None = None

    def view(self, state: Mapping[str, Tensor]) -> Tensor:
        """Return the tensor as a view of the parameter."""
        tensor = state[self.parameter]
        return tensor if self.length is None else tensor.narrow(self.dim, self.start, self.length)

    def fill(self, state: Mapping[str, Tensor], tensor: Tensor, index: tuple[int, ...] = ()) -> None:
        """Copy values to the tensor or to an index of it. In a sharded tensor, copy the rows of this process."""
        rows, first = self._rows(state)
        if not index:
            rows.copy_(tensor[first : first + len(rows)] if tensor.dim() else tensor)
        elif first <= index[0] < first + len(rows):
            rows[(index[0] - first, *index[1:])].copy_(tensor)

    def add(self, state: Mapping[str, Tensor], tensor: Tensor) -> Tensor:
        """Add float32 values to the tensor, and return the rows of this process, which have changed."""
        rows, first = self._rows(state)
        summand = tensor[first : first + len(rows)].to(rows.device)
        return rows.copy_(rows.to(torch.promote_types(rows.dtype, summand.dtype)) + summand)

    def _rows(self, state: Mapping[str, Tensor]) -> tuple[Tensor, int]:
        """Return the rows of the tensor that this process has, as a view, and the number of the first."""
        rows, first = rows_of(state[self.parameter])
        if self.length is not None and self.dim:
            rows = rows.narrow(self.dim, self.start, self.length)
        elif self.length is not None:
            begin, end = (min(max(row - first, 0), len(rows)) for row in (self.start, self.start + self.length))
            rows, first = rows[begin:end], first + begin - self.start
        return rows, first


def tensor_locations_of(model: nn.Module) -> dict[str, TensorLocation]:
    """Return the location of every tensor of a model by name. Each part of a fused tensor has a separate name."""
    result: dict[str, TensorLocation] = {}
    fused = {path: module for path, module in model.named_modules() if getattr(module, "parts", None)}
    for name in model.state_dict():
        path, _, leaf = name.rpartition(".")
        module = fused.get(path)
        if module is None:
            result[name] = TensorLocation(name)
            continue
        start, dim = 0, 1 if isinstance(module, StackedLinear) else 0
        parts: Mapping[str, int] = module.parts
        for part, length in parts.items():
            around = path.rpartition(".")[0]
            result[f"{around}.{part}.{leaf}" if around else f"{part}.{leaf}"] = TensorLocation(name, dim, start, length)
            start += length
    return result


@dataclass(frozen=True)
class Link:
    """Corresponding tensors of the model and of the file."""

    model: tuple[str, ...]
    file: tuple[str, ...]
    index: tuple[int, ...] = ()
    """The index in a stacked tensor of the model, such as the index of an expert."""
    pattern: Pattern | None = None
    """The rearrangement of the file's tensors to the model's."""
    sizes: Mapping[str, int] = field(default_factory=dict)


class Addition(Protocol):
    """Values that are added to a tensor of the model after it is filled, as by an adapter."""

    @property
    def location(self) -> TensorLocation:
        """The location of the tensor."""

    def check(self) -> None:
        """Raise SpecError if a value is not finite."""

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add the values to the tensor in a state dict. Raise SpecError if the sum is not finite."""


@dataclass(frozen=True)
class WeightMap:
    """All links of a model, and the tensors of a file that are in no link."""

    links: tuple[Link, ...]
    locations: Mapping[str, TensorLocation]
    prefix: str = ""
    body: Set[str] = frozenset()
    """The names of the file that begin with the prefix, without it, and with `{}` for numbers."""
    copies: Mapping[str, str] = field(default_factory=dict)
    ignored: Mapping[str, str] = field(default_factory=dict)
    older: Mapping[str, str] = field(default_factory=dict)
    constants: Mapping[str, float] = field(default_factory=dict)
    zeros: Mapping[str, str | None] = field(default_factory=dict)
    computed: Mapping[str, Expected] = field(default_factory=dict)
    written: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    additions: tuple[Addition, ...] = ()

    @classmethod
    def of_model(cls, model: nn.Module) -> WeightMap:
        """Return the map of a file that `save` wrote, with the names of the model."""
        names = list(model.state_dict())
        return cls(tuple(Link((name,), (name,)) for name in names), {name: TensorLocation(name) for name in names})

    def count_in(self, names: Collection[str]) -> int:
        """Return how many of the names in a file the map contains."""
        return sum(name in names for link in self.links for name in link.file)

    def for_names(self, names: Collection[str]) -> WeightMap:
        """Return the map with the names in a file, which may have a different prefix or `older` names."""
        located = self._at(self._prefix_in(names), names)
        if located is not self and self.links:
            files = {name: name_and_numbers(name)[0] for link in located.links for name in link.file}
            common = {holes for name, holes in files.items() if name in names}
            # A foreign file has a few names in common, and is described by the names of the family.
            located = located if 2 * len(common) > len(set(files.values())) else self
        if not self.older:
            return located
        return max((located._spelt(names), self._spelt(names)), key=lambda spelt: spelt.count_in(names))

    def _spelt(self, names: Collection[str]) -> WeightMap:
        """Return the map for a file with `older` names."""

        def spelt(name: str) -> str:
            spellings = (spelling for old, new in self.older.items() for spelling in _replaced(name, new, old))
            return name if name in names else next((spelling for spelling in spellings if spelling in names), name)

        links = tuple(replace(link, file=tuple(map(spelt, link.file))) for link in self.links)
        return replace(self, links=links, copies={spelt(name): spelt(other) for name, other in self.copies.items()})

    def _prefix_in(self, names: Collection[str]) -> str:
        """Return the prefix under which a file has most names of the body; `self.prefix` if several prefixes do."""
        matches: dict[str, set[str]] = {}
        for name in names:
            parts = name.split(".")
            holes = ["{}" if part.isdigit() else part for part in parts]
            for start in range(len(parts)):
                for stem in {".".join(holes[start:]), ".".join(holes[start:-1])} & self.body:
                    matches.setdefault("".join(f"{part}." for part in parts[:start]), set()).add(stem)
        count = max(map(len, matches.values()), default=0)
        prefixes = [prefix for prefix, stems in matches.items() if len(stems) == count]
        return prefixes[0] if len(prefixes) == 1 else self.prefix

    def _at(self, prefix: str, names: Collection[str]) -> WeightMap:
        """Return the map for a file in which the body has a different prefix.

        Files of the model without its head have no prefix. In the file of a model that contains this model, the head
        has the prefix or a part of it, and the tensors outside of the prefix are left out.
        """
        if prefix == self.prefix:
            return self
        paths = [prefix]
        while paths[-1]:
            paths.append("".join(f"{part}." for part in paths[-1].split(".")[:-2]))

        def at(name: str) -> str:
            if name.startswith(self.prefix):
                return prefix + name.removeprefix(self.prefix)
            return next((path + name for path in paths if path + name in names), name)

        links = tuple(replace(link, file=tuple(map(at, link.file))) for link in self.links)

        def moved(entries: Mapping[str, Value]) -> dict[str, Value]:
            return {at(name): value for name, value in entries.items()}

        copies = {at(name): at(other) for name, other in self.copies.items()}
        located = replace(self, links=links, prefix=prefix, copies=copies, zeros=moved(self.zeros))
        located = replace(located, constants=moved(self.constants), computed=moved(self.computed))
        ignored = moved(self.ignored)
        read = {name for link in links for name in link.file}
        of_body = name_matcher(name for name in (*located.unread, *ignored) if not name.startswith("*"))
        outside = f"outside of `{prefix.rstrip('.')}`"
        unread = [name for name in names if not name.startswith(prefix) and name not in read]
        reasons = {name: outside for name in unread if not of_body.fullmatch(name)}
        return replace(located, ignored={**reasons, **ignored})

    @property
    def unread(self) -> tuple[str, ...]:
        """Patterns of names in the file that are expected and that no link uses."""
        return (*self.copies, *self.ignored, *self.constants, *self.zeros, *self.computed)

    def left_out(self, names: Iterable[str]) -> dict[str, str]:
        """Return the tensors of a file that the model neither contains nor computes, with the reasons."""
        read = {name for link in self.links for name in link.file} | self.copies.keys()
        reasons = {name_matcher([pattern]): reason for pattern, reason in self.ignored.items()}
        matches = {
            name: next((why for pattern, why in reasons.items() if pattern.fullmatch(name)), None) for name in names
        }
        return {name: why for name, why in matches.items() if why is not None and name not in read}

    def places_of(self, link: Link) -> list[TensorLocation]:
        """Return the locations of a link's tensors in the model."""
        return [self.locations[name] for name in link.model]

    def views(self, link: Link, state: Mapping[str, Tensor]) -> list[Tensor]:
        """Return a link's tensors in the model as views."""
        return [location.view(state)[link.index] for location in self.places_of(link)]

    def _state_of(self, link: Link, state: Mapping[str, Tensor]) -> Tensor:
        """Return the parameter that contains a link's first tensor."""
        return state[self.places_of(link)[0].parameter]

    def check_values(self, checkpoint: TensorFiles, state: Mapping[str, Tensor]) -> None:
        """Raise SpecError if a file has invalid values.

        Values are invalid if they are not finite, out of range for the model's dtype, or different from a tied tensor,
        a constant or a computed tensor.
        """
        types = {name: self._state_of(link, state).dtype for link in self.links for name in link.file}
        rank, count = process_of(next(iter(state.values())))
        for name, dtype in list(types.items())[rank::count]:  # processes share the tensors among them
            check_finite(name, checkpoint.read(name), checkpoint.names[name].file, dtype)
        for addition in self.additions:
            addition.check()
        self._check_others(checkpoint)

    @torch.no_grad()
    def load(self, checkpoint: TensorFiles, state: Mapping[str, Tensor], *, checked: bool = False) -> None:
        """Fill the tensors of a state dict from a file that has passed `check`, tensor by tensor.

        Values are checked while loading, unless `check_values` has checked them.
        """
        order, outline = {name: number for number, name in enumerate(checkpoint.names)}, outlines(state)
        for link in sorted(self.links, key=lambda link: order[link.file[0]]):
            tensors = [checkpoint.read(name) for name in link.file]
            for name, tensor in [] if checked else zip(link.file, tensors, strict=True):
                check_finite(name, tensor, checkpoint.names[name].file, self._state_of(link, state).dtype)
            if link.pattern is not None:
                shapes = [tuple(view.shape) for view in self.views(link, outline)]
                tensors = link.pattern.apply(tensors, link.sizes, shapes)
            for location, tensor in zip(self.places_of(link), tensors, strict=True):
                location.fill(state, tensor, link.index)
        for addition in self.additions:
            if not checked:
                addition.check()
            addition.add(state)
        if not checked:
            self._check_others(checkpoint)

    def _check_others(self, checkpoint: TensorFiles) -> None:
        """Check the tensors that are in no link, except tensors that `ignored` lists by full name."""
        linked = {name for link in self.links for name in link.file} | self.ignored.keys()
        self._check_copies(checkpoint, linked)
        for name, value in {**self.constants, **dict.fromkeys(self.zeros, 0.0)}.items():
            if name in checkpoint.names and name not in linked:
                _check_constant(name, checkpoint.read(name), value, self.zeros.get(name))
        for pattern, expected in self.computed.items():
            for name in filter(name_matcher([pattern]).fullmatch, checkpoint.names.keys() - linked):
                stored = checkpoint.read(name)
                if not is_close(stored, expected(name, stored)):
                    message = f"tensor {quoted(name)} differs from the values that the model computes"
                    help = "map it under `tensors`, or correct its entry in the spec"
                    raise SpecError(Diagnostic(message, help=help))

    def _check_copies(self, checkpoint: TensorFiles, linked: Set[str]) -> None:
        for name, other in self.copies.items():
            if name in checkpoint.names and other in checkpoint.names and name not in linked:
                if torch.equal(checkpoint.read(name), checkpoint.read(other)):
                    continue
                message = f"{quoted(name)} and {quoted(other)} are one tensor in the model, but differ in the file"
                raise SpecError(Diagnostic(message, help="remove `tie` from the spec, and map both"))

    def tensors(self, state: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of the file from a state dict, as views where possible."""
        for link in self.links:
            tensors = self.views(link, state)
            if link.pattern is not None:
                tensors = link.pattern.inverse().apply(tensors, link.sizes)
            yield from zip(link.file, tensors, strict=True)
        like = next(iter(state.values()))
        for name, value in self.constants.items():
            yield name, torch.tensor(value, dtype=like.dtype, device=like.device)
        for name, function in self.written.items():
            yield name, function().to(like)


def _replaced(name: str, pattern: str, replacement: str) -> Iterator[str]:
    """Yield a name that matches a pattern, with the prefix or suffix of a different pattern."""
    start, star, end = pattern.partition("*")
    if name == pattern or (star and name.startswith(start) and name.endswith(end)):
        middle = name.removeprefix(start).removesuffix(end)
        yield replacement.replace("*", middle)


def _check_constant(name: str, tensor: Tensor, value: float, location: str | None) -> None:
    if not torch.equal(tensor, torch.full_like(tensor, value)):
        message = f"tensor {quoted(name)} must have only the value {value:g}, because the model has no such tensor"
        help = f"add the tensor to the model: --set {location}=true" if location else MAPPING_HELP
        raise SpecError(Diagnostic(message, help=help))


def write_shards(
    weights: WeightMap,
    state: Mapping[str, Tensor],
    folder: Path,
    *,
    metadata: Mapping[str, str],
    max_bytes: int = MAX_SHARD,
) -> list[Path]:
    """Write the tensors of a state dict under the names of a map, with `metadata`, and return the files.

    In addition to the model, at most one shard is in memory.
    """
    outlines = weights.tensors({name: tensor.to("meta") for name, tensor in state.items()})
    sizes = ((name, tensor.nbytes) for name, tensor in outlines)
    return write_tensors(sizes, weights.tensors(state), folder, metadata=metadata, max_bytes=max_bytes)


def write_tensors(
    sizes: Iterable[tuple[str, int]],
    tensors: Iterator[tuple[str, Tensor]],
    folder: Path,
    *,
    metadata: Mapping[str, str],
    max_bytes: int = MAX_SHARD,
) -> list[Path]:
    """Write tensors, whose names and bytes are `sizes` in the same order, and return the files.

    At most one shard is in memory.
    """
    shards: list[list[str]] = [[]]
    total = size = 0
    for name, n_bytes in sizes:
        if shards[-1] and size + n_bytes > max_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size, total = size + n_bytes, total + n_bytes
    files = [folder / (WEIGHTS if len(shards) == 1 else _shard_name(i, len(shards))) for i in range(len(shards))]
    for names, file in zip(shards, files, strict=True):
        contents = {name: next(tensors)[1].contiguous() for name in names}
        save_file(contents, file, metadata=dict(metadata))
        sort_metadata(file)
    if len(files) > 1:
        locations = {name: file.name for names, file in zip(shards, files, strict=True) for name in names}
        index = folder / INDEX
        index.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": locations}), encoding="utf-8")
        files.append(index)
    return files


def sort_metadata(file: Path) -> None:
    """Sort the metadata in the header of a safetensors file by name, so that equal contents are equal bytes.

    safetensors writes the metadata in random order. The length of the header does not change.
    """
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        opened.seek(8)
        opened.write(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode().ljust(length))


def _shard_name(index: int, count: int) -> str:
    return f"model-{index + 1:05}-of-{count:05}.safetensors"

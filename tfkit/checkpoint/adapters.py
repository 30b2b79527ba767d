"""LoRA adapters (https://arxiv.org/abs/2106.09685): two matrices of low rank for a weight, in the files of PEFT.

The weight that an adapter changes is W + scale B A, with A [rank, columns] and B [rows, rank]. A folder with an adapter
stands for the merged model: whatever reads its weights reads the weights of the base, and adds the products. The names
in a folder are the names of modules of tfkit's model, or of the published model, whose matrices may be ranges of rows
of a fused matrix, or have rows in a different order.
"""

from __future__ import annotations

import json
import shutil
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import save_file
from torch import Tensor, fx, nn

from tfkit.checkpoint.files import BROKEN, TensorFiles, check_finite, is_finite
from tfkit.checkpoint.links import FamilyLinks
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.pattern import Pattern
from tfkit.checkpoint.remote_code import folder_names
from tfkit.checkpoint.weight_map import TensorLocation
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.nn import Linear
from tfkit.nn.spread import outlines
from tfkit.spec.adapter_files import ALPHA, ALPHAS, BASE, RSLORA, read_adapter
from tfkit.spec.folder import ADAPTER, ADAPTER_WEIGHTS
from tfkit.spec.header import quoted_path

PREFIX = "base_model.model."
A, B = ".lora_A.weight", ".lora_B.weight"
WEIGHT = ".weight"


@dataclass(frozen=True)
class Matrix:
    """A matrix that an adapter can change: the weight of a linear layer, or of a part of a fused layer.

    Attributes:
        layer: the path of the layer.
        part: the name of the part; empty for the full layer.
        start: the first row in the layer.
        rows: the row, counted from `start`, of each row of the published matrix; None if their order is the same.
        columns: the column of each column of the published matrix; None if their order is the same.
        shape: the number of rows and columns.
    """

    layer: str
    part: str
    start: int
    shape: tuple[int, int]
    rows: Tensor | None = None
    columns: Tensor | None = None

    @property
    def name(self) -> str:
        """The name of the layer, or of the part as in the weight map."""
        return ".".join(filter(None, (self.layer.rpartition(".")[0], self.part))) if self.part else self.layer

    @property
    def location(self) -> TensorLocation:
        """The rows of the layer's weight."""
        return TensorLocation(f"{self.layer}{WEIGHT}", 0, self.start, self.shape[0])


class LoraFactors(NamedTuple):
    """The two matrices of an adapter, and the factor of their product."""

    a: Tensor
    b: Tensor
    scale: float


@dataclass(frozen=True)
class Matrices:
    """The matrices of a model that adapters can change, by the names that a file or a run can use.

    Attributes:
        layers: by the path of a linear layer.
        parts: by the name of a part of a fused layer.
        in_folder: layers by their names in a folder with code for transformers.
        published: by the name of a module of the published model.
        fused: names of published modules that are no single matrix of the model, with the reason.
        prefix: the prefix of most published names, which a class without a head does not have.
    """

    layers: Mapping[str, Matrix]
    parts: Mapping[str, Matrix]
    in_folder: Mapping[str, Matrix]
    published: Mapping[str, Matrix]
    fused: Mapping[str, str]
    prefix: str = ""
    llama: Mapping[str, Matrix] = field(default_factory=dict)

    @classmethod
    def of(cls, model: fx.GraphModule) -> Matrices:
        """Return the matrices of a built model."""
        layers, parts = dict[str, Matrix](), dict[str, Matrix]()
        for path, module in model.named_modules():
            if not is_plain_linear(module):
                continue
            assert isinstance(module, nn.Linear)
            layers[path] = Matrix(path, "", 0, (module.out_features, module.in_features))
            start = 0
            for part, length in (getattr(module, "parts", None) or {}).items():
                matrix = Matrix(path, part, start, (length, module.in_features))
                parts[matrix.name] = matrix
                start += length
        graph = model.meta["graph"]
        in_folder = {folder_names(graph)(path): matrix for path, matrix in layers.items()}
        llama = folder_names(graph, LlamaNames.of(model, graph))
        by_llama = {llama(path): matrix for path, matrix in {**layers, **parts}.items()}
        if graph.spec.family is None:
            return cls(layers, parts, in_folder, {}, {}, llama=by_llama)
        ranges = {(m.layer, m.start, m.shape[0]): m for m in (*parts.values(), *layers.values())}
        entries = dict(_published_matrices(model, ranges))
        published = {name: matrix for name, matrix in entries.items() if isinstance(matrix, Matrix)}
        fused = {name: reason for name, reason in entries.items() if isinstance(reason, str)}
        return cls(layers, parts, in_folder, published, fused, graph.spec.family.prefix, by_llama)

    def named(self, module: str) -> Matrix | None:
        """Return the matrix of a module in a file; None if the model has none."""
        named = {**self.llama, **self.published, **self.in_folder, **self.parts, **self.layers}
        names = (module, f"{self.prefix}{module}", module.removeprefix(self.prefix))
        return next((named[name] for name in names if name in named), None)

    @cached_property
    def of_base(self) -> Mapping[str, Matrix]:
        """The matrices by the names of modules in transformers: published, or of a folder with the model's code."""
        return self.published or self.in_folder


class Adapted(nn.Module, ABC):
    """A linear layer with adapters as its children. Its `weight` is still the weight of the spec."""

    @abstractmethod
    def merged_weight(self) -> Tensor:
        """Return the weight with the products of its adapters."""


def merged_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a model by the names of its spec, with adapters merged into the weights."""
    named = (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False))
    tensors = {name: tensor for tensors in named for name, tensor in tensors}
    for path, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, Adapted):
            inside = [f"{path}.{name}.{leaf}" for name, child in module.named_children() for leaf in child._parameters]
            tensors = {name: tensor for name, tensor in tensors.items() if name not in inside}
            tensors[f"{path}{WEIGHT}"] = module.merged_weight()
    return tensors


def is_plain_linear(module: nn.Module) -> bool:
    """Return True for linear layers, also with adapters, whose weight is used only when they are called.

    Subclasses may compute more, such as a router, or may not be called, such as the output of torch's attention.
    """
    return type(module) in (nn.Linear, Linear) or isinstance(module, Adapted)


def _published_matrices(
    model: fx.GraphModule, ranges: Mapping[tuple[str, int, int], Matrix]
) -> Iterator[tuple[str, Matrix | str]]:
    """Yield the modules of a published model with their matrices in the model, or the reason why there is none."""
    family = model.meta["graph"].spec.family
    weights = FamilyLinks(model, family).map
    layers = {matrix.layer for matrix in ranges.values()}
    traces: dict[Any, list[tuple[Tensor, Tensor] | None]] = {}
    state = outlines(model.state_dict())
    for link in weights.links:
        locations = weights.places_of(link)
        owners = {location.parameter.removesuffix(WEIGHT) for location in locations}
        if link.index or not owners <= layers or not all(name.endswith(WEIGHT) for name in (*link.file, *link.model)):
            continue
        names = [name.removesuffix(WEIGHT) for name in link.file]
        shapes = [tuple(location.view(state).shape) for location in locations]
        starts = [location.start for location in locations]
        if link.pattern is None:
            for name, location, shape in zip(names, locations, shapes, strict=True):
                yield name, ranges[location.parameter.removesuffix(WEIGHT), location.start, shape[0]]
            continue
        if len(owners) > 1:
            yield from ((name, "its rows are in several layers of the model") for name in names)
            continue
        key = (id(link.pattern), tuple(link.sizes.items()), tuple(shapes), tuple(starts))
        if key not in traces:
            traces[key] = _traced(link.pattern, link.sizes, shapes, starts)
        for name, trace in zip(names, traces[key], strict=True):
            yield name, _traced_matrix(next(iter(owners)), trace, ranges)


def _traced(
    pattern: Pattern, sizes: Mapping[str, int], shapes: Sequence[tuple[int, ...]], starts: Sequence[int]
) -> list[tuple[Tensor, Tensor] | None]:
    """Return the row and the column in the layer of each row and column of the matrices that a pattern writes.

    None for a matrix whose elements a pattern rearranges in a different way.
    """

    def written(axis: int) -> list[Tensor]:
        indices = []
        for shape, start in zip(shapes, starts, strict=True):
            numbers = torch.arange(shape[axis], device="cpu")
            view = (numbers + start)[:, None] if axis == 0 else numbers[None]
            indices.append(view.expand(shape))
        return pattern.inverse().apply(indices, sizes)

    return [_axes(*pair) for pair in zip(written(0), written(1), strict=True)]


def _axes(rows: Tensor, columns: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return the rows and the columns of a matrix [rows, columns], or of its transpose, by their indices."""
    for row, column in ((rows, columns), (rows.mT, columns.mT)) if rows.dim() == 2 else ():
        if (row == row[:, :1]).all() and (column == column[:1]).all():
            return row[:, 0], column[0]
    return None


def _traced_matrix(
    layer: str, trace: tuple[Tensor, Tensor] | None, ranges: Mapping[tuple[str, int, int], Matrix]
) -> Matrix | str:
    if trace is None:
        return "its rows and columns are mixed in the model"
    rows, columns = trace
    start = int(rows.min())
    matrix = ranges.get((layer, start, len(rows)))
    if matrix is None or not torch.equal(rows.sort().values, torch.arange(start, start + len(rows), device="cpu")):
        return f"its rows are neither all rows nor a part of `{layer}`"
    return replace(matrix, rows=_order(rows - start), columns=_order(columns))


def _order(indices: Tensor) -> Tensor | None:
    """Return the indices; None if they are in order."""
    return None if torch.equal(indices, torch.arange(len(indices), device="cpu")) else indices


# ---- reading: the products that are added to the weights of a base ----


@dataclass(frozen=True)
class LowRankAddition:
    """A product of two matrices in a file, which is added to a matrix of the model."""

    matrix: Matrix
    module: str
    """The name of the module in the file."""
    file: TensorFiles
    names: tuple[str, str]
    scale: float

    def factors(self) -> LoraFactors:
        """Return the two matrices in the order of the model's rows and columns."""
        a, b = (self.file.read(name).float() for name in self.names)
        rows, columns = self.matrix.rows, self.matrix.columns
        if rows is not None:
            b = torch.empty_like(b).index_copy_(0, rows, b)
        if columns is not None:
            a = torch.empty_like(a).index_copy_(1, columns, a)
        return LoraFactors(a, b, self.scale)

    @property
    def rank(self) -> int:
        """The number of rows of the first matrix."""
        return int(self.file.names[self.names[0]].shape[0])

    def check(self) -> None:
        """Raise SpecError if a value is not finite."""
        for name in self.names:
            check_finite(name, self.file.read(name), self.file.names[name].file)

    @property
    def location(self) -> TensorLocation:
        """The rows of the model that change."""
        return self.matrix.location

    def add(self, state: Mapping[str, Tensor]) -> None:
        """Add the product to the weight in a state dict. Raise SpecError if the sum is not finite."""
        a, b, scale = self.factors()
        if not is_finite(self.location.add(state, scale * (b @ a))):
            path = next(iter(self.file.metadata)).parent
            message = f"{quoted(self.matrix.name)} has {BROKEN} after the adapter in {quoted_path(path)} is merged"
            raise SpecError(Diagnostic(message, help="load the model in float32"))


def additions_of(model: fx.GraphModule, checkpoint: TensorFiles) -> tuple[LowRankAddition, ...]:
    """Return what the adapters of a checkpoint add to the weights of a model. Raise SpecError if they do not fit."""
    if not checkpoint.adapters:
        return ()
    matrices = Matrices.of(model)
    return tuple(added for file in checkpoint.adapters for added in _additions_of_file(file, matrices))


def _additions_of_file(file: TensorFiles, matrices: Matrices) -> Iterator[LowRankAddition]:
    path = next(iter(file.metadata))
    settings = read_adapter(path.parent)
    for module, names in _modules_in(file, path).items():
        stripped = module.removeprefix(PREFIX)
        matrix = matrices.named(stripped)
        if matrix is None:
            raise _unknown_module(stripped, path, matrices)
        shapes = [file.names[name].shape for name in names]
        rank = shapes[0][0] if shapes[0] else 0
        expected = [(rank, matrix.shape[1]), (matrix.shape[0], rank)]
        if not rank or [tuple(shape) for shape in shapes] != expected:
            message = f"the matrices of {quoted(stripped)} in {quoted_path(path)} must have the shapes"
            got = " and ".join(str(list(shape)) for shape in shapes)
            text = f"[rank, {matrix.shape[1]}] and [{matrix.shape[0]}, rank]; got {got}"
            raise SpecError(Diagnostic(f"{message} {text}", help="name the model that the adapter was trained on"))
        yield LowRankAddition(matrix, stripped, file, names, settings.scale(stripped, rank))


def _modules_in(file: TensorFiles, path: Path) -> dict[str, tuple[str, str]]:
    """Return the names of the two matrices of each module in a file."""
    modules: dict[str, tuple[str, str]] = {}
    for name in file.names:
        suffix = next((suffix for suffix in (A, B) if name.endswith(suffix)), None)
        module = name.removesuffix(suffix or "")
        if suffix is None or not file.names[name].dtype.is_floating_point:
            message = f"{quoted_path(path)} must contain only the two matrices of each module; got {quoted(name)}"
            raise SpecError(Diagnostic(message, help="train linear layers only, or merge the adapter with PEFT"))
        if other := next((m for m in (f"{module}{A}", f"{module}{B}") if m not in file.names), None):
            raise SpecError(Diagnostic(f"{quoted_path(path)} lacks {quoted(other)}, which belongs to {quoted(name)}"))
        modules[module] = (f"{module}{A}", f"{module}{B}")
    return modules


def _unknown_module(module: str, path: Path, matrices: Matrices) -> SpecError:
    reason = matrices.fused.get(module)
    message = f"the adapter in {quoted_path(path.parent)} changes {quoted(module)}, which is no matrix of the model"
    notes = (reason,) if reason else (f"matrices: {listing(matrices.of_base or matrices.layers, 4)}",)
    return SpecError(
        Diagnostic(message, notes=notes, help="name the spec of the model that the adapter was trained on")
    )


# ---- writing ----


class Adapter(NamedTuple):
    """An adapter that is written: its matrices by module, and the settings that only training uses."""

    modules: Mapping[str, LoraFactors]
    base: str
    dropout: float = 0.0


def published_factors(matrices: Matrices, factors: Mapping[str, tuple[Matrix, LoraFactors]]) -> dict[str, LoraFactors]:
    """Return the matrices of adapters by the modules of transformers.

    A fused matrix of the model is split if its parts are published apart; adapters of several parts are joined if they
    are published as one matrix. Raises SpecError if no published module contains the rows of an adapter.
    """
    result: dict[str, LoraFactors] = {}
    written: Counter[str] = Counter()
    for module, to in matrices.of_base.items():
        inside = {
            name: (*overlap, matrix, value)
            for name, (matrix, value) in factors.items()
            if (overlap := _overlap(matrix, to)) is not None
        }
        if not inside:
            continue
        scale = next(iter(inside.values()))[-1].scale
        a = torch.cat([value.a for *_, value in inside.values()])
        blocks = []
        for name, (first, end, matrix, value) in inside.items():
            written[name] += end - first
            block = value.b.new_zeros(to.shape[0], value.b.size(1))
            block[first - to.start : end - to.start] = value.b[first - matrix.start : end - matrix.start]
            blocks.append(block * (value.scale / scale))
        b = torch.cat(blocks, dim=1)
        result[module] = LoraFactors(
            a if to.columns is None else a[:, to.columns], b if to.rows is None else b[to.rows], scale
        )
    if lost := [name for name, (matrix, _) in factors.items() if written[name] < matrix.shape[0]]:
        notes = tuple(f"{name}: {why}" for name, why in matrices.fused.items())[:4]
        raise SpecError(
            Diagnostic(f"the published model has no module for the adapter of {quoted(lost[0])}", notes=notes)
        )
    return result


def _overlap(matrix: Matrix, other: Matrix) -> tuple[int, int] | None:
    """Return the first row of a layer that is in both matrices, and the row after the last; None without such rows."""
    if matrix.layer != other.layer:
        return None
    first = max(matrix.start, other.start)
    end = min(matrix.start + matrix.shape[0], other.start + other.shape[0])
    return (first, end) if first < end else None


def write_adapter(adapter: Adapter, folder: Path) -> None:
    """Write an adapter to a folder that exists."""
    ranks = {module: len(value.a) for module, value in adapter.modules.items()}
    alphas = {module: _short(value.scale * ranks[module]) for module, value in adapter.modules.items()}
    (rank, _), *_ = Counter(ranks.values()).most_common(1)
    (alpha, _), *_ = Counter(alphas.values()).most_common(1)
    settings = {
        "peft_type": "LORA",
        "auto_mapping": None,
        BASE: adapter.base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        ALPHA: alpha,
        ALPHAS: {_regex(module): value for module, value in alphas.items() if value != alpha},
        "lora_dropout": adapter.dropout,
        "modules_to_save": None,
        "r": rank,
        "rank_pattern": {_regex(module): value for module, value in ranks.items() if value != rank},
        "target_modules": list(adapter.modules),
        "task_type": None,
        RSLORA: False,
    }
    (folder / ADAPTER).write_text(f"{json.dumps(settings, indent=2)}\n", encoding="utf-8")
    tensors = {
        f"{PREFIX}{module}{suffix}": tensor.contiguous()
        for module, (a, b, _) in adapter.modules.items()
        for suffix, tensor in ((A, a), (B, b))
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    shutil.copymode(folder / ADAPTER, folder / ADAPTER_WEIGHTS)


def _regex(module: str) -> str:
    return f"^{module}$".replace(".", r"\.")


def _short(value: float) -> float:
    """Return a number as an integer if it differs only by rounding."""
    return round(value) if abs(value - round(value)) <= 1e-9 * abs(value) else value

"""LoRA adapters (https://arxiv.org/abs/2106.09685) in the model of a run: matrices of low rank that alone are trained.

The layers of the model stay in their places, with their weights. They become `AdaptedLinear`, and get the matrices as
submodules. A state dict of the model has only the tensors of its spec, so weights are read and compared as without
adapters. The tensors of checkpoints are `checkpoint_tensors`.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.building.builder import build, graph_of
from tfkit.building.initialize import initialize
from tfkit.checkpoint.adapters import (
    PREFIX,
    A,
    Adapted,
    Adapter,
    B,
    LoraFactors,
    LowRankAddition,
    Matrices,
    Matrix,
    additions_of,
    write_adapter,
)
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.folder_format import spec_text, write_model
from tfkit.checkpoint.selection import is_match, no_match, shortened_names
from tfkit.errors import Invalid, listing, quoted
from tfkit.nn import Linear, part
from tfkit.nn.layers import linear
from tfkit.run.checked_run import Run
from tfkit.run.run_spec import AdaptersConfig
from tfkit.spec.extending import short_path
from tfkit.spec.folder import ADAPTER_WEIGHTS, SPEC, WEIGHTS, model_folder

ADAPTERS = "adapters"
"""The key of `model.meta` with the `InsertedAdapters` of a model."""


class LowRank(nn.Module):
    """The matrices of an adapter: `b a` times a scale is added to rows of the weight of a layer.

    Args:
        matrix: the rows.
        config: the rank, the scale and the dropout.
        layer: the layer.

    Attributes:
        a: [rank, columns], as in PEFT's `lora_A`.
        b: [rows, rank], zeros at first, as in PEFT's `lora_B`.
    """

    def __init__(self, matrix: Matrix, config: AdaptersConfig, layer: nn.Linear) -> None:
        super().__init__()
        (rows, columns), like = matrix.shape, layer.weight
        self._around = matrix.start, layer.out_features - matrix.start - rows
        self.matrix, self.scale, self.dropout = matrix, config.scale, config.dropout
        self.a = nn.Parameter(torch.empty(config.rank, columns, dtype=like.dtype, device=like.device))
        self.b = nn.Parameter(torch.empty(rows, config.rank, dtype=like.dtype, device=like.device))

    def reset_parameters(self) -> None:
        """Fill the matrices as PEFT does: their product is zero."""
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))
        nn.init.zeros_(self.b)

    def forward(self, x: Tensor) -> Tensor:
        """Return what is added to the output of the layer: [..., columns] -> [..., rows of the layer]."""
        x = F.dropout(x, self.dropout, self.training)
        return F.pad(F.linear(F.linear(x, self.a), self.b) * self.scale, self._around)

    def product(self) -> Tensor:
        """Return what is added to the weight of the layer."""
        return F.pad(self.scale * (self.b @ self.a), (0, 0, *self._around))

    def _save_to_state_dict(self, *args: Any) -> None:
        """Save nothing: a state dict of a model has the tensors of its spec."""

    def _load_from_state_dict(self, *args: Any) -> None:
        """Load nothing, and miss nothing."""


class AdaptedLinear(Linear, Adapted):
    """A linear layer with adapters, each for all of its rows or for a part."""

    def forward(self, x: Tensor) -> Tensor:
        y = linear(x, self.weight, self.bias)
        for adapter in self.children():
            y = y + adapter(x)  # not in place: recomputation may keep the product of the layer
        return y

    def merged_weight(self) -> Tensor:
        weight: Tensor = self.weight
        for adapter in self.children():
            assert isinstance(adapter, LowRank)
            weight = weight + adapter.product()
        return weight


@dataclass(frozen=True)
class InsertedAdapters:
    """The adapters of a model: their settings, the weights that they change, and their matrices."""

    config: AdaptersConfig
    base: Path
    matrices: tuple[Matrix, ...]


def insert_adapters(model: fx.GraphModule, run: Run) -> None:
    """Add the adapters of a run, if it has any, to its model, with initial values, and freeze all other parameters.

    Raises SpecError for targets that match no matrix, and for a rank that exceeds the sides of a matrix.
    """
    config, weights = run.config.adapters, run.config.weights
    if config is None:
        return
    try:
        matrices = tuple(chosen_matrices(Matrices.of(model), config, model))
    except Invalid as error:
        raise run.refused(error, "adapters") from error
    base = Path() if weights is None else model_folder(Path(weights.path))  # a run that is checked has random weights
    _insert(model, InsertedAdapters(config, base, matrices))
    if not next(model.parameters()).is_meta:
        initialize(model, graph_of(model), run.config.seed, only={module for _, module in low_ranks(model)})


def _insert(model: fx.GraphModule, inserted: InsertedAdapters) -> None:
    model.requires_grad_(False)
    model.meta[ADAPTERS] = inserted
    for matrix in inserted.matrices:
        layer = model.get_submodule(matrix.layer)
        assert isinstance(layer, nn.Linear)
        if not isinstance(layer, AdaptedLinear):
            vars(layer).setdefault("parts", None)
            vars(layer).setdefault("residual", False)
            layer.__class__ = AdaptedLinear
        name = f"lora_{matrix.part}" if matrix.part else "lora"
        layer.add_module(name, LowRank(matrix, inserted.config, layer))


def low_ranks(model: nn.Module) -> Iterator[tuple[str, LowRank]]:
    """Yield the adapters of a model with their paths."""
    return ((path, module) for path, module in model.named_modules() if isinstance(module, LowRank))


def chosen_matrices(matrices: Matrices, config: AdaptersConfig, model: nn.Module) -> Iterator[Matrix]:
    """Yield the matrices that the targets of a run match, each once.

    A target matches the paths of linear layers, else the names of parts of fused layers, else the names of modules of
    the published model; in each, the full name or its end.
    """
    chosen: dict[str, tuple[Matrix, str]] = {}
    for number, target in enumerate(config.targets):
        for matrix in _matches(matrices, target, number, model):
            for name, (other, pattern) in chosen.items():
                if name != matrix.name and other.layer == matrix.layer and "" in (other.part, matrix.part):
                    message = f"`{matrix.name}`, which `{target}` matches, and `{name}`, which `{pattern}` matches,"
                    help = "name the fused layer or its parts"
                    raise Invalid(f"targets.{number}", f"{message} are the same rows", help=help)
            if config.rank > min(matrix.shape):
                message = f"`rank` must be at most {min(matrix.shape)}, the smaller side of `{matrix.name}`"
                raise Invalid("rank", f"{message} {list(matrix.shape)}; got {config.rank}", help="lower the rank")
            chosen.setdefault(matrix.name, (matrix, target))
    return (matrix for matrix, _ in chosen.values())


def _matches(matrices: Matrices, target: str, number: int, model: nn.Module) -> list[Matrix]:
    """Return the matrices that a target matches. Raise `Invalid` if there are none."""
    namings = (matrices.layers, matrices.parts, matrices.published)
    for named in namings:
        if matches := [matrix for name, matrix in named.items() if _is_target(name, target)]:
            _check_unambiguous(matrices, target, number, {matrix.layer for matrix in matches})
            return matches
    field = f"targets.{number}"
    if reason := next((f"`{name}`: {why}" for name, why in matrices.fused.items() if _is_target(name, target)), None):
        message = f"`{target}` must be a matrix of the model"
        raise Invalid(field, message, notes=(reason,), help="name layers of the model: `tfkit params --by module`")
    module = next((module for path, module in model.named_modules() if path and _is_target(path, target)), None)
    if module is not None:
        message = f"`{target}` must match linear layers; got {type(module).__name__}"
        raise Invalid(field, message, help=f"name linear layers, such as `{next(iter(matrices.layers), None)}`")
    names = [name for named in reversed(namings) for name in named]
    raise no_match(field, f"no linear layer matches {quoted(target)}", target, names)


def _check_unambiguous(matrices: Matrices, target: str, number: int, layers: Container[str]) -> None:
    """Raise `Invalid` if a name also stands for modules of the published model that are different layers."""
    published = {name: matrix for name, matrix in matrices.published.items() if _is_target(name, target)}
    if "*" in target or all(matrix.layer in layers for matrix in published.values()):
        return
    module = next(name for name, matrix in published.items() if matrix.layer not in layers)
    message = f"`{target}` must be a name of layers of the model or of the published model; got a name of different"
    help = f"write more of the path, for instance `{'.'.join(module.split('.')[-3:])}`, or a pattern with `*`"
    raise Invalid(f"targets.{number}", f"{message} layers in both", notes=(f"published: {module}",), help=help)


def _is_target(name: str, target: str) -> bool:
    return is_match(name, target) or is_match(name, f"*.{target}")


def adapters_description(model: fx.GraphModule) -> str:
    """Describe the adapters of a model: their number, their parameters, and the layers that have them."""
    inserted: InsertedAdapters = model.meta[ADAPTERS]
    total = sum(parameter.numel() for parameter in model.parameters())
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    names = listing(shortened_names([matrix.name for matrix in inserted.matrices]), 24)
    return f"{trained:,} of {total:,} parameters, rank {inserted.config.rank}: {names}"


# ---- the tensors of checkpoints ----


def checkpoint_tensors(model: fx.GraphModule) -> dict[str, Tensor]:
    """Return the tensors that a checkpoint of a model has: of its adapters by their names in the file, else all."""
    if ADAPTERS not in model.meta:
        return dict(model.state_dict())
    return {
        name: tensor.detach()
        for _, module in low_ranks(model)
        for name, tensor in zip(_names_of(module), (module.a, module.b), strict=True)
    }


def _names_of(module: LowRank) -> tuple[str, str]:
    """Return the names of the matrices `a` and `b` in a file."""
    return f"{PREFIX}{module.matrix.name}{A}", f"{PREFIX}{module.matrix.name}{B}"


@torch.no_grad()
def restore_tensors(model: fx.GraphModule, tensors: Mapping[str, Tensor]) -> None:
    """Copy the tensors of a checkpoint to a model; see `checkpoint_tensors`."""
    if ADAPTERS not in model.meta:
        state = model.state_dict()
        model.load_state_dict({name: part(tensor, state[name]) for name, tensor in tensors.items()})
        return
    for name, tensor in checkpoint_tensors(model).items():
        tensor.copy_(part(tensors[name], tensor))


def outline_of(model: fx.GraphModule) -> fx.GraphModule:
    """Return a model like `model`, with its adapters, without values."""
    outline = build(graph_of(model), device="meta")
    if ADAPTERS in model.meta:
        _insert(outline, model.meta[ADAPTERS])
    return outline


def assign_tensors(outline: fx.GraphModule, tensors: Mapping[str, Tensor]) -> fx.GraphModule:
    """Put the tensors of a checkpoint into an outline, and return it; see `checkpoint_tensors`."""
    if ADAPTERS not in outline.meta:
        outline.load_state_dict(tensors, assign=True)
    for _, module in low_ranks(outline):
        module.a, module.b = (nn.Parameter(tensors[name]) for name in _names_of(module))
    return outline


def weights_file(model: fx.GraphModule) -> str:
    """Return the name of the file with the tensors of a checkpoint."""
    return ADAPTER_WEIGHTS if ADAPTERS in model.meta else WEIGHTS


def write_weights(model: fx.GraphModule, folder: Path) -> None:
    """Write the spec and the weights of a model to a folder that exists; if it has adapters, only the adapters."""
    if ADAPTERS not in model.meta:
        write_model(model, graph_of(model), folder)
        return
    inserted: InsertedAdapters = model.meta[ADAPTERS]
    (folder / SPEC).write_text(spec_text(graph_of(model).spec), encoding="utf-8")
    modules = {m.matrix.name: LoraFactors(m.a.detach(), m.b.detach(), m.scale) for _, m in low_ranks(model)}
    write_adapter(Adapter(modules, str(inserted.base), inserted.config.dropout), folder)


# ---- the start from an adapter ----


@contextmanager
def matching_adapter(model: fx.GraphModule, folder: Path) -> Iterator[Mapping[str, LowRankAddition]]:
    """Open the adapter in a folder, and yield its matrices by name.

    Raises `Invalid` unless the adapter changes the same matrices as the adapters of the model, at the same rank.
    """
    with TensorFiles.open(folder) as files:
        if not files.adapters:
            message = f"`start` must be the folder of an adapter; got {quoted(str(short_path(folder)))}"
            raise Invalid("start", message, help="write the folder of other weights as `weights` of the run")
        ranks = {module.matrix.name: len(module.a) for _, module in low_ranks(model)}
        additions = {added.matrix.name: added for added in additions_of(model, files)}
        in_file = {name: added.rank for name, added in additions.items()}
        for name in {**ranks, **in_file}:
            if ranks.get(name) != in_file.get(name):
                sides = (f"rank {side[name]}" if name in side else "no matrices" for side in (ranks, in_file))
                notes = ("{}: {} in the run, {} in the file".format(name, *sides),)
                message = f"the adapter in {quoted(str(short_path(folder)))} must have the matrices of the run"
                help = "use the same `targets` and `rank`, or add new adapters to the merged weights: `weights: DIR`"
                raise Invalid("start", message, notes=notes, help=help)
        yield additions


@torch.no_grad()
def start_from(model: fx.GraphModule, folder: Path) -> str:
    """Fill the adapters of a model from the adapter in a folder, and return a description. Raises `Invalid`."""
    with matching_adapter(model, folder) as additions:
        for _, module in low_ranks(model):
            added = additions[module.matrix.name]
            added.check()
            a, b, scale = added.factors()
            for parameter, tensor in ((module.a, a), (module.b, b * (scale / module.scale))):
                parameter.copy_(part(tensor.to(parameter.dtype), parameter))
    return f"{len(additions):,} matrices from {short_path(folder)}"

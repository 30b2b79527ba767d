"""Comparison of two models on the same tokens: their differences, and the first component at which they diverge."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx, nn

from tfkit.arguments import AnyPath, Limit, Positive, Seed, checked
from tfkit.building.edits import AnyModel, MeasuredModel, as_model, copy_weights
from tfkit.building.placement import AnyDevice, AnyDtype, device_of, dtype_of
from tfkit.checkpoint.tensor_names import counts_by_module
from tfkit.errors import Diagnostic, SpecError, listing
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len, rows_of
from tfkit.spec.extending import SUFFIXES
from tfkit.spec.folder import CONFIG, SPEC, holds_code
from tfkit.tools.common.loading_weights import build_with_weights
from tfkit.tools.common.model_inputs import random_inputs, usual_length
from tfkit.tools.compare.other_model import Other, other_model

RETURNED = "(output of the model)"
FADED = 1e-4
"""Maximum fraction of a difference that may remain in outputs that count as equal; real differences fade less."""
Tolerance: TypeAlias = Annotated[float, Limit(minimum=0)]


@dataclass(frozen=True)
class ComparedPart:
    """A component of A, and the corresponding component of B.

    Attributes:
        name: its path in A.
        other: its path in B.
        difference: the largest difference between their outputs.
        size: the largest value of B's output, at least 1. Differences are relative to it.
        index: the index of the largest difference.
        values: the values of A and B at that index.
        reference: the largest difference of A's output from its output in float64, if requested.
    """

    name: str
    other: str
    difference: float
    size: float
    index: tuple[int, ...]
    values: tuple[float, float]
    reference: float | None

    @property
    def relative(self) -> float:
        """The difference relative to the size."""
        return self.difference / self.size


@dataclass(frozen=True)
class Unlike:
    """A component of both models that cannot be compared: its paths in A and B, and the reason."""

    name: str
    other: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The results of two models for the same tokens.

    Attributes:
        difference: the largest difference between the models' outputs; None if the outputs cannot be compared.
        parts: the components of both models, in the order in which A runs them; the models' outputs come last.
        first: the first component that differs by more than the tolerance, relative to its size.
        forms: differing components before `first` that are equivalent: the outputs that depend on them agree, for
            instance if B's attention already adds the residual; or the outputs are equal up to a constant factor.
        unlike: the components of both models that cannot be compared.
        alone: the components that only A has and, if B is a spec, the components that only B has.
        left_out: the numbers of tensors of the weights that A omits, by module.
    """

    difference: float | None
    parts: tuple[ComparedPart, ...]
    first: ComparedPart | None
    forms: tuple[ComparedPart, ...]
    unlike: tuple[Unlike, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    tolerance: float
    float64: bool
    left_out: Mapping[str, int]

    @property
    def equal(self) -> bool:
        """True if no component differs by more than the tolerance, and the outputs can be compared."""
        return self.first is None and self.difference is not None


@checked
def compare(
    a: AnyModel,
    b: AnyModel,
    *,
    weights: AnyPath | None = None,
    other_weights: AnyPath | None = None,
    allow_change: bool = False,
    batch: Positive = 2,
    length: Positive | None = None,
    seed: Seed = 0,
    tolerance: Tolerance = 1e-5,
    float64: bool = False,
    device: AnyDevice = "cpu",
    dtype: AnyDtype = torch.float32,
) -> Comparison:
    """Run two models on the same tokens.

    Args:
        a: the model to list the components of: a spec, or a built model, which is copied with its edits.
        b: a second spec or built model; or the folder of a transformers model; or a file that `torch.jit.save` or
            `torch.export.save` wrote from A.
        weights: the weights of both models. By default, a built model has its weights, the model of a folder has the
            weights in the folder, and a model without weights uses the weights of the other model. If neither has
            weights, they are random.
        other_weights: the weights of B, if B is a spec and its weights differ.
        allow_change: accept weights that were saved with values that differ from A's. B may always differ from them.
        dtype: the dtype of both models. Most published models are stored in bfloat16, in which a single rounding
            exceeds the tolerance.
        batch: number of sequences.
        length: tokens per sequence; by default 16, or the maximum that both accept.
        seed: the seed of the tokens, and of random weights.
        tolerance: the largest difference that counts as equal, relative to the largest value if that is above 1.
        float64: also compare A with A in float64, to distinguish rounding from an error.
        device: the device of both models.

    Raises:
        SpecError: the weights do not fit, B cannot be read, or the models do not accept the same inputs.
    """
    measured, device = "its modules are run, on inputs of the spec", device_of(device)
    a = as_model(a, measured)
    b = Path(b) if isinstance(b, str | os.PathLike) and not is_spec(b) else as_model(b, measured)
    graph = a.graph if isinstance(b, Path) else b.graph
    inputs, renamed = common_inputs(a.graph, graph, batch=batch, length=length, device=device, seed=seed)
    options: dict[str, Any] = {"device": device, "dtype": dtype_of(dtype), "seed": seed}
    model, other = _built_models(a, b, weights, other_weights, allow_change, options)
    names = {**other.names, "": ""}

    def run() -> Any:
        return model(**inputs)

    with torch.no_grad():
        ours, order = module_outputs(model, other.names, run, "A")
        theirs, _ = module_outputs(other.model, other.names.values(), lambda: other.run(renamed), "B")
        exact = _float64_outputs(model, other.names, inputs) if float64 else {}
        results = {
            name: _compared_component(name, names[name], ours[name], theirs.get(names[name]), exact.get(name))
            for name in [*order, ""]
        }
        parts = {name: part for name, part in results.items() if isinstance(part, ComparedPart)}
        equal = {name for name, part in parts.items() if part.relative <= tolerance}
        differ = [name for name in parts if name not in equal]

        def cleared(name: str) -> bool:
            agree = {other for other in equal if parts[other].relative <= FADED * parts[name].relative}
            return _is_proportional(ours[name], theirs[names[name]]) or bool(
                reached_modules(model, name, agree, run) & agree
            )

        first = _first_of(differ, cleared)
    return Comparison(
        difference=parts[""].difference if "" in parts else None,
        parts=tuple(parts.values()),
        first=None if first is None else parts[first],
        forms=tuple(parts[name] for name in differ[: None if first is None else differ.index(first)]),
        unlike=tuple(part for part in results.values() if isinstance(part, Unlike)),
        alone=other.alone,
        tolerance=tolerance,
        float64=float64,
        left_out=counts_by_module(model.meta.get("left_out", ())),
    )


def _built_models(
    a: MeasuredModel,
    b: MeasuredModel | Path,
    weights: AnyPath | None,
    other_weights: AnyPath | None,
    allow_change: bool,
    options: dict[str, Any],
) -> tuple[fx.GraphModule, Other]:
    """Build both models; a model without weights gets the weights of the other model."""
    chosen = weights or a.graph.weights
    source = chosen or (None if a.module is not None else _weights_of(b))
    model = build_with_weights(a, source, allow_change=allow_change or chosen is None, **options).eval()
    default = None if isinstance(b, MeasuredModel) and b.module is not None else _weights_of(b) or source
    other = other_model(model, b, other_weights or weights or default, **options)
    if isinstance(b, MeasuredModel) and isinstance(other.model, fx.GraphModule):
        if a.module is not None and all(value is None for value in (b.module, other_weights, b.graph.weights)):
            copy_weights(other.model, model)
        if b.module is not None and a.module is None and chosen is None:
            copy_weights(model, other.model)
    return model, other


def _float64_outputs(model: fx.GraphModule, names: Iterable[str], inputs: Mapping[str, Tensor]) -> Outputs:
    double = copy.deepcopy(model).double()
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    return module_outputs(double, names, lambda: double(**wide), "A")[0]


def _first_of(differ: list[str], cleared: Callable[[str], bool]) -> str | None:
    """Return the first component that differs and is not cleared.

    Clearing a component in one layer clears it in all layers.
    """
    cleared_patterns: set[str] = set()
    for name in differ:
        pattern = re.sub(r"\d+", "*", name)
        if not name or (pattern not in cleared_patterns and not cleared(name)):
            return name
        cleared_patterns.add(pattern)
    return None


def _is_proportional(ours: Tensor, theirs: Tensor) -> bool:
    """Return True if two tensors are proportional: embedding tables of transformers return scaled vectors."""
    factor = (ours * theirs).sum() / ours.square().sum()
    return bool(factor > 0 and torch.allclose(theirs, ours * factor, rtol=1e-5, atol=0))


def _weights_of(b: MeasuredModel | Path) -> Path | None:
    """Return the folder with the weights of B; None for a spec without weights, and for a program."""
    return b.graph.weights if isinstance(b, MeasuredModel) else b if os.path.isdir(b) else None


def is_spec(name: str | os.PathLike[str]) -> bool:
    """Return True for the name of a spec or of a folder with a spec; False for published models and for programs.

    The folder of a published model that tfkit wrote contains both a config.json and a spec. It is compared as
    transformers reads it, unless it contains code, which transformers would have to run.
    """
    path = Path(name)
    has_config, has_spec = (os.path.exists(path / file) for file in (CONFIG, SPEC))
    if has_spec:
        return not has_config or holds_code(path)
    return not os.path.exists(path) or path.suffix in SUFFIXES


def _compared_component(
    name: str, other: str, ours: Tensor, theirs: Tensor | None, exact: Tensor | None
) -> ComparedPart | Unlike:
    """Compare one component, or return the reason why it cannot be compared."""
    name, other = name or RETURNED, other or RETURNED
    if theirs is None:
        return Unlike(name, other, "it returns a tensor only in A")
    if theirs.shape != ours.shape:
        return Unlike(name, other, f"{list(ours.shape)} in A, {list(theirs.shape)} in B")
    gap = (ours.double() - theirs.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    index = int(gap.argmax())
    location = tuple(int(number) for number in np.unravel_index(index, gap.shape))
    reference = None if exact is None else float((ours.double() - exact).abs().max())
    return ComparedPart(
        name,
        other,
        float(gap.max()),
        max(1.0, float(theirs.abs().max())),
        location,
        (float(ours[location]), float(theirs[location])),
        reference,
    )


# ---- the outputs of a model's components in one run, and their dependence on each other ----


Outputs = dict[str, Tensor]
Replace = Callable[[Tensor], Tensor]
Run = Callable[[], Any]


def module_outputs(model: nn.Module | None, names: Iterable[str], run: Run, which: str) -> tuple[Outputs, list[str]]:
    """Run a model, and return the outputs of the named modules and of the full model (`""`).

    Also return the modules in the order in which they first finished.
    """
    values: Outputs = {}

    def keep(name: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            values.setdefault(name, output.detach().clone())  # some models modify outputs in place
            return output

        return value

    try:
        with _output_hooks(model, {name: keep(name) for name in names}):
            result = run()
    except Exception as error:  # a program, or a model of transformers, may raise any error
        cause = str(error).strip().partition("\n")[0]
        raise SpecError(Diagnostic(f"{which} fails on these inputs: {type(error).__name__}: {cause}")) from error
    order = list(values)
    values[""] = _first_tensor(result)
    return values, order


def reached_modules(model: nn.Module, name: str, candidates: Iterable[str], run: Run) -> set[str]:
    """Return the candidates, modules or the full model (`""`), that a NaN in the output of a module reaches."""

    def nothing(output: Tensor) -> Tensor:
        return torch.full_like(output, torch.nan) if output.is_floating_point() else output

    reached: set[str] = set()

    def look(candidate: str) -> Replace:
        def value(output: Tensor) -> Tensor:
            if output.isnan().any():
                reached.add(candidate)
            return output

        return value

    with _output_hooks(
        model, {name: nothing, **{candidate: look(candidate) for candidate in candidates if candidate != name}}
    ):
        if _first_tensor(run()).isnan().any():
            reached.add("")
    return reached


def _output_hooks(model: nn.Module | None, values: dict[str, Replace]) -> ExitStack:
    """Apply functions to the first tensor that each module returns, until the context ends."""

    def hook(replace: Replace) -> Callable[..., Any]:
        def called(module: nn.Module, args: Any, output: Any) -> Any:
            if isinstance(output, Tensor):
                return replace(output)
            if type(output) in (tuple, list) and output and isinstance(output[0], Tensor):
                return type(output)([replace(output[0]), *output[1:]])
            return output

        return called

    hooks = ExitStack()
    for name, value in values.items():
        if model is not None:
            hooks.enter_context(model.get_submodule(name).register_forward_hook(hook(value)))
    return hooks


def _first_tensor(result: Any) -> Tensor:
    return result[0] if isinstance(result, tuple) else result


# ---- random inputs that both models accept, under the names of each model ----


INPUT_HELP = "compare models that accept the same inputs"
SPECIAL_IDS = 4
"""Number of ids at the start of a vocabulary that inputs avoid: families use some of them for padding."""


def common_inputs(
    a: Graph, b: Graph, *, batch: int, length: int | None, device: torch.device | str, seed: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return equal random inputs for A and for B.

    Inputs with equal names correspond. Each remaining required input corresponds to the next input of its type in the
    other model. Optional inputs that only one model has are omitted. Tokens are from the smaller vocabulary. If A seeks
    the token at the end of a text, each text has such a token. The length is 16 in addition to the placeholders of
    images, or the maximum that both models accept.

    Raises:
        SpecError: a model requires an input that the other model lacks, or features of a different width; or it does
            not accept `length` tokens.
    """
    names = dict(_input_pairs(a, b))
    for graph, other, paired in ((a, b, set(names)), (b, a, set(names.values()))):
        lost = [name for name, signal in graph.inputs.items() if name not in paired and not signal.optional]
        if lost:
            message = f"`{graph.name}` requires {_listed_inputs(graph, lost)}, but `{other.name}` has no such input"
            note = f"`{other.name}` takes {_listed_inputs(other, list(other.inputs))}"
            raise SpecError(Diagnostic(message, notes=(note,), help=INPUT_HELP))
    for name, theirs in names.items():
        widths = a.inputs[name].width, b.inputs[theirs].width
        if widths[0] != widths[1]:
            message = f"`{name}` has vectors of width {widths[0]} in `{a.name}`, but {widths[1]} in `{b.name}`"
            raise SpecError(Diagnostic(message, help=INPUT_HELP))
    inputs = random_inputs(a, batch=batch, length=_input_length(a, b, length), device=device, seed=seed)
    ours: dict[str, Tensor] = {}
    for name in names:
        rows = [rows for rows in (rows_of(a, name), rows_of(b, names[name])) if rows]
        tokens = a.inputs[name].type == "tokens"
        ours[name] = _ordinary_tokens(inputs[name] % min(rows), name) if tokens and rows else inputs[name]
    ours |= {name: _with_end(ours[name], end) for name, end in _end_tokens(a).items() if name in ours}
    return ours, {names[name]: value for name, value in ours.items()}


def _input_pairs(a: Graph, b: Graph) -> Iterator[tuple[str, str]]:
    """Yield pairs of corresponding inputs: the name in A, and the name in B."""
    equal = {name for name in a.inputs if name in b.inputs and a.inputs[name].type == b.inputs[name].type}
    for type in dict.fromkeys(signal.type for signal in a.inputs.values()):
        rest = [_required_inputs(graph, type, equal) for graph in (a, b)]
        yield from zip(*rest, strict=False)
    yield from ((name, name) for name in a.inputs if name in equal)


def _required_inputs(graph: Graph, type: str, paired: set[str]) -> list[str]:
    inputs = graph.inputs.items()
    return [name for name, signal in inputs if signal.type == type and not signal.optional and name not in paired]


def _listed_inputs(graph: Graph, names: list[str]) -> str:
    return listing(f"`{name}` ({graph.inputs[name].in_words()})" for name in names)


def _input_length(a: Graph, b: Graph, length: int | None) -> int:
    limits: Mapping[str, int | None] = {graph.name: max_len(graph) for graph in (a, b)}
    for name, limit in limits.items():
        if length is not None and limit is not None and length > limit:
            raise SpecError(Diagnostic(f"`length` must be at most {limit:,}, the limit of `{name}`; got {length:,}"))
    usual = max(usual_length(a), usual_length(b))
    return length or min([usual, *(limit for limit in limits.values() if limit is not None)])


def _end_tokens(graph: Graph) -> dict[str, int]:
    """Return the id of the token that a block seeks as the end of a text, by the name of the input."""
    return {str(node.wires[field]): end for node in graph.nodes for field, end in node.config.ends().items()}


def _with_end(tokens: Tensor, end: int) -> Tensor:
    """Set the last token of the first row, the last but one of the second row, and so on, to the end of a text."""
    rows = torch.arange(tokens.size(0), device=tokens.device)
    return tokens.index_put((rows, (-1 - rows) % tokens.size(1)), torch.tensor(end, device=tokens.device))


def _ordinary_tokens(tokens: Tensor, name: str) -> Tensor:
    """Replace the first tokens of the vocabulary, which may be special tokens."""
    return tokens if name == "token_types" or tokens.max() <= SPECIAL_IDS else tokens.clamp(min=SPECIAL_IDS)

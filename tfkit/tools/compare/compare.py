"""Two models on the same tokens: how much they differ, and the first component at which they diverge."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import AnyPath, Limit, Positive, Seed, checked
from tfkit.builder import build, graph_of
from tfkit.checkpoint.links import published
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.expand import Graph
from tfkit.graph.given import AnySpec, as_graph
from tfkit.placement import AnyDevice, device_of
from tfkit.spec.find import SUFFIXES
from tfkit.spec.folder import CONFIG, SPEC
from tfkit.tools.common.weights import build_with_weights
from tfkit.tools.compare.common_inputs import common_inputs
from tfkit.tools.compare.matching_modules import matching_modules

Outputs = dict[str, Tensor]
RETURNED = "(output of the model)"
Tolerance: TypeAlias = Annotated[float, Limit(least=0)]


@dataclass(frozen=True)
class Compared:
    """A component of A and the corresponding one of B.

    Attributes:
        name: its path in A.
        other: its path in B.
        difference: the largest one between their outputs.
        size: the largest value of B's output, at least 1: differences are relative to it.
        place: the index of the largest difference.
        values: the values of A and B at that index.
        reference: the largest difference of A's output from its output in float64, if requested.
    """

    name: str
    other: str
    difference: float
    size: float
    place: tuple[int, ...]
    values: tuple[float, float]
    reference: float | None


@dataclass(frozen=True)
class Unlike:
    """A component of both models that cannot be compared: its paths, and the reason."""

    name: str
    other: str
    reason: str


@dataclass(frozen=True)
class Comparison:
    """The results of two models for the same tokens.

    Attributes:
        difference: the largest one between their outputs; None if they cannot be compared.
        parts: the components that both have, in the order in which A runs them; the models' outputs come last.
        first: the first of them that differs by more than the tolerance, relative to its size.
        unlike: the components that both have but that cannot be compared.
        alone: the components that only A has, and those that only B has, if B is a spec.
    """

    difference: float | None
    parts: tuple[Compared, ...]
    first: Compared | None
    unlike: tuple[Unlike, ...]
    alone: tuple[tuple[str, ...], tuple[str, ...]]
    tolerance: float
    float64: bool

    @property
    def equal(self) -> bool:
        """True if no component differs by more than the tolerance, and the outputs can be compared."""
        return self.first is None and self.difference is not None


@dataclass(frozen=True)
class Other:
    """The model that A is compared with: how to run it, and the names of A's modules in it."""

    run: Callable[[Mapping[str, Tensor]], Any]
    model: nn.Module | None
    names: Mapping[str, str]
    alone: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


@checked
def compare(
    a: AnySpec,
    b: AnySpec,
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
) -> Comparison:
    """Run two models on the same tokens.

    Args:
        a: the model to list the components of, or its spec.
        b: another one, or its spec; or the folder of a transformers model, whose weights both get; or a file that
            `torch.jit.save` or `torch.export.save` wrote from A.
        weights: the weights of both; those of the folder, or random ones, unless given.
        other_weights: the weights of B, if B is a spec with different ones.
        allow_change: accept weights that were saved with other values than A's; B may always have others.
        batch: number of sequences.
        length: tokens of each of them; 16, or the most that both can read, unless given.
        seed: the seed of the tokens, and of random weights.
        tolerance: the largest difference that counts as equal, relative to the largest value if that is above 1.
        float64: compare A with itself in float64, too, to distinguish rounding from a mistake.
        device: the device of both.

    Raises:
        SpecError: the weights do not fit, or B cannot be read; or the two cannot be given the same inputs.
    """
    a, device = as_graph(a), device_of(device)
    b = as_graph(b) if isinstance(b, Graph | Mapping) or is_spec(b) else Path(b)
    folder = b if isinstance(b, Path) and os.path.isdir(b) else None
    source = folder if weights is None else Path(weights)
    second = b if isinstance(b, Graph) else a
    inputs, renamed = common_inputs(a, second, batch=batch, length=length, device=device, seed=seed)
    model = _model(a, source, device, seed, allow_change=allow_change).eval()
    other = _other(model, b, source if other_weights is None else Path(other_weights), device, seed)
    with torch.no_grad():
        ours, order = _outputs(model, list(other.names), lambda: model(**inputs), "A")
        theirs, _ = _outputs(other.model, list(other.names.values()), lambda: other.run(renamed), "B")
        exact: Outputs = {}
        if float64:
            double = copy.deepcopy(model).double()
            wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
            exact, _ = _outputs(double, list(other.names), lambda: double(**wide), "A")
    names = {**other.names, "": ""}
    found = [
        _compared(name, names[name], ours[name], theirs.get(names[name]), exact.get(name)) for name in [*order, ""]
    ]
    parts = tuple(part for part in found if isinstance(part, Compared))
    unlike = tuple(part for part in found if isinstance(part, Unlike))
    first = next((part for part in parts if not part.difference <= tolerance * part.size), None)
    last = found[-1].difference if isinstance(found[-1], Compared) else None
    return Comparison(last, parts, first, unlike, other.alone, tolerance, float64)


def is_spec(name: str | os.PathLike[str]) -> bool:
    """True if a name is that of a spec or of a folder with one, and not of another folder or a file with a program."""
    path = os.fspath(name)
    return not os.path.exists(path) or path.endswith(SUFFIXES) or os.path.exists(os.path.join(path, SPEC))


def _model(
    graph: Graph, weights: Path | None, device: torch.device | str, seed: int, *, allow_change: bool
) -> fx.GraphModule:
    if weights is None:
        return build(graph, device=device, seed=seed)
    return build_with_weights(graph, weights, device=device, allow_change=allow_change)


def _other(
    model: fx.GraphModule, b: Graph | Path, weights: Path | None, device: torch.device | str, seed: int
) -> Other:
    if isinstance(b, Graph):
        second = _model(b, weights, device, seed, allow_change=True).eval()
        ours, theirs = ([name for name, _ in one.named_modules()] for one in (model, second))
        alone = _outermost(ours, theirs), _outermost(theirs, ours)
        return Other(lambda inputs: second(**inputs), second, {n: n for n in ours if n in theirs}, alone)
    if os.path.isdir(b):
        return _transformers(model, b, device)
    return Other(_exported(b, device), None, {})


def _outermost(names: list[str], others: list[str]) -> tuple[str, ...]:
    """The modules that the other model does not have, without those inside them."""
    known = set(others)
    return tuple(name for name in names if name not in known and name.rpartition(".")[0] in known)


def _transformers(model: fx.GraphModule, folder: Path, device: torch.device | str) -> Other:
    """A transformers model, its modules found through the map of its weights."""
    graph = graph_of(model)
    family = graph.spec.family
    if family is None:
        message = f"{quoted(graph.name)} has no `checkpoint`, which would name its modules in transformers"
        raise SpecError(Diagnostic(message, None, "checkpoint", help="specs/README.md shows how to write it"))
    if not os.path.isfile(folder / CONFIG):
        raise SpecError(Diagnostic(f"{quoted(str(folder))} has no {CONFIG}: it is not a transformers model"))
    try:
        import transformers
    except ImportError:
        message = "to run a transformers model, transformers must be installed"
        raise SpecError(Diagnostic(message, help="pip install transformers")) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    said = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("architectures") or [family.architecture]
    cls = getattr(transformers, str(said[0]), None)
    if cls is None:
        raise SpecError(Diagnostic(f"transformers has no {quoted(str(said[0]))}", help="install a version that has it"))
    dtype = next(model.parameters()).dtype
    theirs = cls.from_pretrained(folder, attn_implementation="eager", dtype=dtype).to(device).eval()
    modules = {path: not list(module.children()) for path, module in theirs.named_modules()}
    links = published(model, family).links
    if family.prefix and family.prefix.removesuffix(".") not in modules:  # files use another name
        start, cut = f"{theirs.base_model_prefix}.", len(family.prefix)
        links = tuple(
            replace(link, file=tuple(start + n[cut:] if n.startswith(family.prefix) else n for n in link.file))
            for link in links
        )
    return Other(lambda inputs: _first(theirs(**_renamed(inputs))), theirs, matching_modules(model, links, modules))


def _first(found: Any) -> Any:
    """The first output of a transformers model: logits, or the last hidden state if it has no head."""
    return found.logits if hasattr(found, "logits") else found[0]


def _renamed(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our inputs under their names in transformers."""
    words = {
        "tokens": "input_ids",
        "source": "input_ids",
        "target": "decoder_input_ids",
        "token_types": "token_type_ids",
    }
    return {words.get(name, name): value for name, value in inputs.items()}


def _exported(path: Path, device: torch.device | str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A program that torch wrote: TorchScript, or a file of torch.export."""
    try:
        if path.suffix == ".pt2":
            program = torch.export.load(path).module()
        else:
            program = torch.jit.load(str(path), map_location=device)
    except Exception as error:
        message = f"{quoted(str(path))} is neither a spec, nor a folder, nor a program that torch wrote"
        raise SpecError(Diagnostic(message, notes=(str(error).strip().partition("\n")[0],))) from error
    return lambda inputs: program(**inputs)


def _outputs(
    model: nn.Module | None, names: list[str], run: Callable[[], Any], which: str
) -> tuple[Outputs, list[str]]:
    """The outputs of the named modules and of the whole, and the order in which the modules first finished."""
    found: Outputs = {}
    try:
        with _hooks(model, names, found):
            result = run()
    except Exception as error:  # of a program or a model written by others
        cause = str(error).strip().partition("\n")[0]
        raise SpecError(Diagnostic(f"{which} fails on these inputs: {type(error).__name__}: {cause}")) from error
    order = list(found)
    found[""] = result[0] if isinstance(result, tuple) else result
    return found, order


@contextmanager
def _hooks(model: nn.Module | None, names: list[str], found: Outputs) -> Iterator[None]:
    handles = []

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            value = output[0] if isinstance(output, tuple | list) and output else output
            if isinstance(value, Tensor):
                found.setdefault(name, value.detach())

        return hook

    if model is not None:
        handles += [model.get_submodule(name).register_forward_hook(keep(name)) for name in names]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _compared(name: str, other: str, ours: Tensor, theirs: Tensor | None, exact: Tensor | None) -> Compared | Unlike:
    """The difference of one component, or why it cannot be compared."""
    name, other = name or RETURNED, other or RETURNED
    if theirs is None:
        return Unlike(name, other, "it returns a tensor only in A")
    if theirs.shape != ours.shape:
        return Unlike(name, other, f"{list(ours.shape)} in A, {list(theirs.shape)} in B")
    gap = (ours.double() - theirs.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    index = int(gap.argmax())
    place = tuple(int(one) for one in torch.unravel_index(torch.tensor(index), gap.shape))
    reference = None if exact is None else float((ours.double() - exact).abs().max())
    return Compared(
        name,
        other,
        float(gap.max()),
        max(1.0, float(theirs.abs().max())),
        place,
        (float(ours[place]), float(theirs[place])),
        reference,
    )

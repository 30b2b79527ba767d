"""Two models on the same tokens: how much they differ, and the first component where they part."""

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
from tfkit.checkpoint.published import published
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.expand import Graph
from tfkit.graph.given import AnySpec, as_graph
from tfkit.placement import AnyDevice, device_of
from tfkit.spec.load import SUFFIXES
from tfkit.tools.counterparts import counterparts
from tfkit.tools.importing import CONFIG
from tfkit.tools.inputs import random_inputs
from tfkit.tools.weights import build_with_weights

Outputs = dict[str, Tensor]
Tolerance: TypeAlias = Annotated[float, Limit(least=0)]
SPECIAL = 4
"""Rows in front of a vocabulary that are no ordinary tokens."""


@dataclass(frozen=True)
class Part:
    """A component of A and the same one of B.

    Attributes:
        name: its path in A.
        other: its path in B.
        difference: the largest one between their outputs.
        size: the largest value of B's output, at least 1: a difference counts in proportion to it.
        place: where that is, in the output.
        values: what A has there, and B.
        reference: the largest difference of A's output from its output in float64, if that was asked for.
    """

    name: str
    other: str
    difference: float
    size: float
    place: tuple[int, ...]
    values: tuple[float, float]
    reference: float | None


@dataclass(frozen=True)
class Comparison:
    """What two models do with the same tokens.

    Attributes:
        difference: the largest one between what they return.
        parts: the components that both have, in the order in which A runs them; what they return comes last.
        first: the first of them that differs by more than the tolerance, in times of its size.
    """

    difference: float
    parts: tuple[Part, ...]
    first: Part | None
    tolerance: float
    float64: bool

    @property
    def equal(self) -> bool:
        """Whether no component differs by more than the tolerance."""
        return self.first is None


@dataclass(frozen=True)
class Other:
    """The model that A is compared with: how to run it, and what its parts are called there."""

    run: Callable[[Mapping[str, Tensor]], Tensor]
    model: nn.Module | None
    names: Mapping[str, str]


@checked
def compare(
    a: AnySpec,
    b: AnySpec,
    *,
    weights: AnyPath | None = None,
    batch: Positive = 2,
    length: Positive = 16,
    seed: Seed = 0,
    tolerance: Tolerance = 1e-5,
    float64: bool = False,
    device: AnyDevice = "cpu",
) -> Comparison:
    """Run two models on the same tokens.

    Args:
        a: the model whose components are listed, or its spec.
        b: another one, or its spec; or the folder of a model of transformers, whose weights both get; or a file that
            `torch.jit.save` or `torch.export.save` wrote of A.
        weights: the weights of both; those of the folder, or random ones, unless given.
        batch: number of sequences.
        length: of each of them.
        seed: of the tokens, and of random weights.
        tolerance: what counts as equal, in times of the largest value where that is above 1.
        float64: compare A with itself in float64 as well, to tell its rounding from a mistake.
        device: where both run.

    Raises:
        SpecError: the weights do not fit, or what B is cannot be read.
    """
    a, device = as_graph(a), device_of(device)
    b = as_graph(b) if isinstance(b, Graph) or is_spec(b) else Path(b)
    folder = b if isinstance(b, Path) and b.is_dir() else None
    source = folder if weights is None else Path(weights)
    model = _model(a, source, device, seed).eval()
    inputs = random_inputs(a, batch=batch, length=length, device=device, seed=seed)
    inputs = {name: value if name == "token_types" else _ordinary(value) for name, value in inputs.items()}
    other = _other(model, b, source, device, seed)
    with torch.no_grad():
        ours, order = _outputs(model, list(other.names), lambda: model(**inputs))
        theirs, _ = _outputs(other.model, list(other.names.values()), lambda: other.run(inputs))
        exact: Outputs = {}
        if float64:
            double = copy.deepcopy(model).double()
            wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
            exact, _ = _outputs(double, list(other.names), lambda: double(**wide))
    names = {**other.names, "": ""}
    parts = [_part(name, names[name], ours[name], theirs.get(names[name]), exact.get(name)) for name in [*order, ""]]
    found = tuple(part for part in parts if part is not None)
    first = next((part for part in found if not part.difference <= tolerance * part.size), None)
    return Comparison(found[-1].difference, found, first, tolerance, float64)


def is_spec(name: str | os.PathLike[str]) -> bool:
    """Whether a name is that of a spec, and not of a folder or a file with a program."""
    return not Path(name).exists() or Path(name).suffix in SUFFIXES


def _ordinary(tokens: Tensor) -> Tensor:
    """Tokens without the first ones of the vocabulary, by which some families know padding."""
    return tokens if tokens.is_floating_point() or tokens.max() <= SPECIAL else tokens.clamp(min=SPECIAL)


def _model(graph: Graph, weights: Path | None, device: torch.device | str, seed: int) -> fx.GraphModule:
    if weights is None:
        return build(graph, device=device, seed=seed)
    return build_with_weights(graph, weights, device=device)


def _other(
    model: fx.GraphModule, b: Graph | Path, weights: Path | None, device: torch.device | str, seed: int
) -> Other:
    if isinstance(b, Graph):
        second = _model(b, weights, device, seed).eval()
        shared = {name for name, _ in second.named_modules()}
        return Other(lambda inputs: second(**inputs), second, {n: n for n, _ in model.named_modules() if n in shared})
    if b.is_dir():
        return _transformers(model, b, device)
    return Other(_exported(b, device), None, {})


def _transformers(model: fx.GraphModule, folder: Path, device: torch.device | str) -> Other:
    """A model of transformers, its parts found through the map of its weights."""
    graph = graph_of(model)
    section = graph.spec.model.checkpoint
    if section is None:
        message = f"{quoted(graph.name)} has no `checkpoint`, so that nothing says what its parts are called there"
        raise SpecError(Diagnostic(message, None, "checkpoint", help="specs/README.md shows how to write it"))
    if not (folder / CONFIG).is_file():
        raise SpecError(Diagnostic(f"{quoted(str(folder))} has no {CONFIG}: it is no model of transformers"))
    try:
        import transformers
    except ImportError:
        message = "to run a model of transformers, transformers must be installed"
        raise SpecError(Diagnostic(message, help="pip install transformers")) from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    said = json.loads((folder / CONFIG).read_text(encoding="utf-8")).get("architectures") or [section.architecture]
    cls = getattr(transformers, str(said[0]), None)
    if cls is None:
        raise SpecError(Diagnostic(f"transformers has no {quoted(str(said[0]))}", help="install a version that has it"))
    dtype = next(model.parameters()).dtype
    theirs = cls.from_pretrained(folder, attn_implementation="eager", dtype=dtype).to(device).eval()
    modules = {path: not list(module.children()) for path, module in theirs.named_modules()}
    links = published(model, section).links
    if section.prefix and section.prefix.removesuffix(".") not in modules:  # files name it in another way
        start, cut = f"{theirs.base_model_prefix}.", len(section.prefix)
        links = tuple(
            replace(link, file=tuple(start + n[cut:] if n.startswith(section.prefix) else n for n in link.file))
            for link in links
        )
    return Other(lambda inputs: theirs(**_renamed(inputs)).logits, theirs, counterparts(model, links, modules))


def _renamed(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our inputs under the names of transformers."""
    words = {
        "tokens": "input_ids",
        "source": "input_ids",
        "target": "decoder_input_ids",
        "token_types": "token_type_ids",
    }
    return {words.get(name, name): value for name, value in inputs.items()}


def _exported(path: Path, device: torch.device | str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """A program that torch wrote: TorchScript, or what torch.export makes."""
    try:
        if path.suffix == ".pt2":
            program = torch.export.load(path).module()
        else:
            program = torch.jit.load(str(path), map_location=device)
    except Exception as error:
        message = f"{quoted(str(path))} is neither a spec, nor a folder, nor a program that torch wrote"
        raise SpecError(Diagnostic(message, notes=(str(error).strip().partition("\n")[0],))) from error
    return lambda inputs: program(**inputs)


def _outputs(model: nn.Module | None, names: list[str], run: Callable[[], Any]) -> tuple[Outputs, list[str]]:
    """What the named modules and the whole return, and the order in which the modules ended first."""
    found: Outputs = {}
    with _hooks(model, names, found):
        result = run()
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


def _part(name: str, other: str, ours: Tensor, theirs: Tensor | None, exact: Tensor | None) -> Part | None:
    """The difference of one component; None where they cannot be laid side by side."""
    if theirs is None or theirs.shape != ours.shape:
        return None
    gap = (ours.double() - theirs.double()).abs()
    gap = torch.where(gap.isnan(), torch.inf, gap)
    index = int(gap.argmax())
    place = tuple(int(one) for one in torch.unravel_index(torch.tensor(index), gap.shape))
    reference = None if exact is None else float((ours.double() - exact).abs().max())
    return Part(
        name or "(what they return)",
        other or "(what they return)",
        float(gap.max()),
        max(1.0, float(theirs.abs().max())),
        place,
        (float(ours[place]), float(theirs[place])),
        reference,
    )

"""Properties of training: gradients, dropout, and layers that run again in the backward."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, fx, nn

from tfkit.building.placement import forked_generator
from tfkit.component import FieldPath, MaskConfig, SublayerConfig, leaf_values, training_only_values
from tfkit.errors import listing
from tfkit.graph.expand import wire_sources
from tfkit.graph.wiring import heads_of_tables
from tfkit.tools.check.measure import Deviation, property_of, require, tensor_deviation
from tfkit.tools.check.model_under_test import ModelUnderTest, redraw_parameters
from tfkit.tools.check.properties.basics import each_of
from tfkit.tools.check.runs import Choices, Inputs, call, cast_inputs, eval_outputs, temporary_hooks

BATCHES = 24
"""Number of batches within which every row and column of a parameter must receive a gradient."""
STEPS, TOLERANCE = (3e-4, 3e-5), 2e-2
"""The steps of a finite difference, at least one of which must agree, and the largest deviation.

Modules that compute in float32 need the large step. Modules with kinks need the small step.
"""


@property_of("gradients", "has finite gradients of all weights")
def finite_gradients(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Every parameter has a gradient in train mode, and all are finite."""
    yield from parameter_gradients(subject.model, subject.inputs(), _untrained_prefixes(subject))


@property_of("padded-gradients", "has finite gradients with a row of padding", follows=("gradients",))
def gradients_beside_padding(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Gradients are finite next to a row that is all padding."""
    require(subject.padded, "no input may be padded")
    yield from parameter_gradients(subject.model, subject.inputs(padding="rows"), _untrained_prefixes(subject))


def _untrained_prefixes(subject: ModelUnderTest) -> tuple[str, ...]:
    """Return the prefixes of the parameters that have no gradient by design."""
    components = subject.model.meta["components"].items()
    sublayers = ((path, part) for path, part in components if isinstance(part, SublayerConfig))
    return tuple(f"{path}.{name}." for path, part in sublayers for name in part.untrained)


def parameter_gradients(model: nn.Module, inputs: Inputs, untrained: tuple[str, ...] = ()) -> Iterator[Deviation]:
    """Find parameters without a gradient in train mode, unless by design, and gradients that are not finite."""
    model = copy.deepcopy(model).train()
    outputs = call(model, inputs)
    if not all(output.isfinite().all() for output in outputs):
        yield Deviation.fault("outputs are not finite in train mode")
        return
    _weighted_sum(outputs).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.requires_grad}
    unused = [
        f"`{name}`" for name, gradient in gradients.items() if gradient is None and not name.startswith(untrained)
    ]
    if unused:
        yield Deviation.fault(f"{each_of(unused)} gets no gradient: nothing uses it", _module_of(unused[0]))
    wild = [
        f"`{name}`" for name, gradient in gradients.items() if gradient is not None and not gradient.isfinite().all()
    ]
    if wild:
        yield Deviation.fault(f"the gradient of {each_of(wild)} is not finite", _module_of(wild[0]))
    if gradients and not any(gradient.any() for gradient in gradients.values() if gradient is not None):
        yield Deviation.fault("every gradient is zero")


def _module_of(name: str) -> str:
    """Return the module of a parameter that is named in quotes."""
    return name.strip("`").rpartition(".")[0]


def _weighted_sum(outputs: list[Tensor], seed: int = 0) -> Tensor:
    """Return a number that depends on every output, with random weights: norms hide plain sums."""
    generator = torch.Generator().manual_seed(seed)
    return torch.stack([(o * torch.randn(o.shape, generator=generator).to(o)).sum() for o in outputs]).sum()


@property_of("every-row", "uses every row and column of weights", of_weights=False, follows=("gradients",))
def every_row(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Every row and column of every parameter has a gradient; of a table, every row that is looked up and used.

    Each batch has different weights, because a unit may be silent by chance. Rows for distances that a mask may hide
    are ignored.
    """
    seen: dict[str, Tensor] = {}
    hidden = _distance_table_prefixes(subject)
    replaced = {token for node in subject.graph.nodes for token in node.config.placeholders().values()}
    for batch in range(BATCHES):
        model = redraw_parameters(copy.deepcopy(subject.model), subject.seed + batch)
        with _looking_up(model) as looked_up:
            _weighted_sum(call(model, subject.inputs(seed=batch)), batch).backward()
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is not None:
                reached = parameter.grad != 0
                if name.startswith(hidden):
                    reached[:] = True
                elif name in looked_up:
                    reached[[row for row in range(reached.size(0)) if row not in looked_up[name] - replaced]] = True
                seen[name] = seen[name] | reached if name in seen else reached
        if not any(
            measurement.broken for name, reached in seen.items() for measurement in _unused_slices(name, reached)
        ):
            break
    for name, reached in seen.items():
        yield from _unused_slices(name, reached)


def _distance_table_prefixes(subject: ModelUnderTest) -> tuple[str, ...]:
    """Return the prefixes of tables with a row for each distance, if some of the distances may have no effect.

    A mask may hide them, or they belong to queries of a last layer that the pooling of its output ignores.
    """
    blocks = {node.name for node in subject.stacks if node.stack is not None and node.stack.blocks is not None}
    pooled = _pooled_layers(subject)
    return tuple(
        f"{path.partition('.')[0]}.{layer.context}.{name}."
        for path, layer in subject.layers.items()
        for name in ("position", "relative.table")
        if path.partition(".")[0] in blocks
        or path in pooled
        or any(step.mask not in (None, MaskConfig(), MaskConfig(right=0)) for step in layer.steps)
    )


def _pooled_layers(subject: ModelUnderTest) -> set[str]:
    """Return the paths of the last layers whose output is only pooled, and that share no table with other layers."""
    layers = set()
    for node in subject.stacks:
        if node.stack is None or node.name in subject.graph.outputs:
            continue
        readers = [reader for reader in subject.graph.nodes if node.name in wire_sources(reader.wires)]
        contexts = [layer.context for layer in node.stack.layers]
        if all(reader.output.type == "vector" for reader in readers) and contexts.count(contexts[-1]) == 1:
            layers.add(f"{node.name}.layers.{len(contexts) - 1}")
    return layers


@contextmanager
def _looking_up(model: nn.Module) -> Iterator[dict[str, set[int]]]:
    """Collect the rows of each table that are looked up, by the name of its weight."""
    rows_by_table: dict[str, set[int]] = {}

    def note(name: str, _module: nn.Module, args: tuple[Tensor, ...]) -> None:
        rows_by_table.setdefault(name, set()).update(args[0].flatten().tolist())

    tables = {f"{path}.weight": module for path, module in model.named_modules() if isinstance(module, nn.Embedding)}
    handles = [module.register_forward_pre_hook(partial(note, name)) for name, module in tables.items()]
    with temporary_hooks(handles):
        yield rows_by_table


def _unused_slices(name: str, reached: Tensor) -> Iterator[Deviation]:
    """Yield the slices of a parameter, along each axis, without a gradient."""
    for axis in range(reached.dim()):
        remaining = tuple(dim for dim in range(reached.dim()) if dim != axis)
        idle = ~reached.any(dim=remaining) if remaining else ~reached
        count, word = int(idle.sum()), ("values" if reached.dim() == 1 else "rows") if axis == 0 else "columns"
        detail = f"{count} of {idle.numel()} {word} of `{name}` have no gradient: nothing uses them"
        yield Deviation(count, detail, 0, _module_of(name))


@property_of("recompute", "has equal bits if layers run again", follows=("gradients",))
def recomputed_layers(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Recomputed layers have bit-identical gradients, also with dropout: they draw the same random numbers."""
    inputs, gradients = subject.inputs(), []
    for again in (False, True):
        model = subject.build(recompute=again).train()
        with forked_generator():
            torch.manual_seed(subject.seed)
            _weighted_sum(call(model, inputs)).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    plain, recomputed = gradients
    for name, expected in plain.items():
        gradient = recomputed[name]
        if expected is not None and gradient is not None:
            detail = f"the gradient of `{name}` changes by {{}} if layers run again in the backward"
            yield tensor_deviation(gradient, expected, detail, limit=0.0, where=_module_of(name))


@property_of("train-mode", "is the same without dropout")
def train_mode(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Without dropout, train mode and eval mode return the same outputs."""
    model = subject.build(subject.changed(without_dropout(subject)))
    inputs = subject.inputs()
    in_eval_mode = subject.run(inputs, model)
    with torch.no_grad():
        for expected, output in zip(in_eval_mode, call(model.train(), inputs), strict=True):
            yield tensor_deviation(output, expected, "without dropout, train mode changes the outputs by {}")


def without_dropout(subject: ModelUnderTest, but: FieldPath = ()) -> dict[FieldPath, Any]:
    """Return the values of a spec without effects in training, except the rate at `but` and the stages next to it."""
    model = subject.graph.spec.model
    values = dict(training_only_values(model))
    for path, value in leaf_values(model):
        if path[:-1] != but[:-1] and value is not None:
            if path[-1] == "stages":
                values[path] = tuple(stage for stage in value if stage != "dropout")
            elif path[-1] == "dropout":
                values[path] = 0.0
    return values


@property_of("dropout", "drops at every rate of its spec", follows=("train-mode",))
def dropout_rates(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Each dropout rate of the spec has an effect when all other rates are 0."""
    rates = {path: value for path, value in subject.values.items() if path[-1] == "dropout" and value}
    require(rates, "every rate of dropout is 0")
    for path, rate in rates.items():
        graph = subject.changed(without_dropout(subject, path))
        model, inputs, runs = subject.build(graph).train(), subject.inputs(), []
        for seed in (1, 2):
            with forked_generator(), torch.no_grad():
                torch.manual_seed(seed)
                runs.append(call(model, inputs))
        if all(torch.equal(first, second) for first, second in zip(*runs, strict=True)):
            yield Deviation.fault(f"`{'.'.join(path[1:])}: {rate}` has no effect in train mode", ".".join(path[1:-1]))
    yield Deviation(0.0, "")


@property_of("derivatives", "has the gradients of its function", follows=("gradients",))
def finite_differences(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Gradients equal finite differences of the function, in float64. Of equal layers, only the first is compared."""
    tied, equal = _tied_weights(subject), _equal_layers(subject)
    yield from _derivative_errors(subject, lambda name: name not in tied and not name.startswith(equal))


def _equal_layers(subject: ModelUnderTest) -> tuple[str, ...]:
    """Return the prefixes of parameters in layers that equal an earlier layer."""
    return tuple(
        f"{node.name}.layers.{number}."
        for node in subject.graph.nodes
        for numbers in (node.stack.variants.values() if node.stack else ())
        for number in numbers[1:]
    )


@property_of("ties", "sums the gradients of a tie", follows=("gradients",))
def tied_gradients(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The gradient of a tied table is the sum of the gradients of its uses."""
    tied = _tied_weights(subject)
    require(tied, "no table is tied")
    yield from _derivative_errors(subject, lambda name: name in tied)


@property_of("shared", "has one module for nodes that share it", follows=("forward",))
def shared_modules(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A change of the weights that `same` shares changes the output of each node, and no node has a copy of them."""
    users = {node.config.same: [node.config.same] for node in subject.graph.nodes if node.config.same}
    require(users, "no node has `same`")
    model, inputs = copy.deepcopy(subject.model), subject.inputs()
    children = dict(model.named_children())
    for node in subject.graph.nodes:
        users.get(node.config.same, []).append(node.name)
    for path, names in users.items():
        before = _outputs_by_call(model, path, inputs)
        redraw_parameters(module := model.get_submodule(path), subject.seed)
        after = _outputs_by_call(model, path, inputs)
        if copies := [name for name in names if name != path and name in children]:
            yield Deviation.fault(f"{listing(copies)} has a copy of the shared module", path)
        if len(before) != len(names):
            yield Deviation.fault(f"{listing(names)} call the shared module {len(before)} times", path)
            continue
        equal = [name for name, *pair in zip(names, before, after, strict=True) if torch.equal(*pair)]
        if equal and list(module.parameters()):
            yield Deviation.fault(f"a change of its weights does not change the output of {listing(equal)}", path)
        yield Deviation(0.0, "")


def _outputs_by_call(model: fx.GraphModule, path: str, inputs: Inputs) -> list[Tensor]:
    """Return the output of each call of a module."""
    outputs: list[Tensor] = []

    def keep(_module: nn.Module, _args: tuple[Any, ...], output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with temporary_hooks([model.get_submodule(path).register_forward_hook(keep)]):
        eval_outputs(model, inputs)
    return outputs


def _tied_weights(subject: ModelUnderTest) -> set[str]:
    return {f"{name}.tokens.weight" for name in heads_of_tables(subject.graph)}


def _derivative_errors(subject: ModelUnderTest, chosen: Callable[[str], bool]) -> Iterator[Deviation]:
    """Compare each parameter's derivative along a random direction with a finite difference, with routing fixed."""
    model = copy.deepcopy(subject.model).double()
    inputs = cast_inputs(subject.inputs(batch=2), torch.float64)
    choices = Choices()
    with choices:
        _weighted_sum(call(model, inputs)).backward()
    same = choices if choices.made else nullcontext()
    for name, parameter in model.named_parameters():
        if not chosen(name) or parameter.grad is None:
            continue
        generator = torch.Generator().manual_seed(subject.seed)
        direction = _unit_vector(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
        direction = _unit_vector(direction + _unit_vector(parameter.grad))
        derivative = float((parameter.grad * direction).sum())
        error = math.inf
        for step in STEPS:
            difference = _half_difference(partial(call, model, inputs), parameter, direction * step, same) / step
            size = max(1.0, abs(derivative), float(parameter.grad.norm()))
            error = min(error, abs(difference - derivative) / size)
            if error <= TOLERANCE:
                break
        detail = f"the gradient of `{name}` differs from a finite difference by {error:.1e}"
        yield Deviation(error, detail, TOLERANCE, _module_of(name))


@torch.no_grad()
def _half_difference(
    run: Callable[[], list[Tensor]], parameter: Tensor, step: Tensor, context: AbstractContextManager[Any]
) -> float:
    """Return half the difference between runs with a parameter moved one step forward and one step back."""
    values = []
    for sign in (1, -1):
        parameter.add_(step, alpha=sign)
        with context:
            values.append(float(_weighted_sum(run())))
        parameter.sub_(step, alpha=sign)
    return (values[0] - values[1]) / 2


def _unit_vector(x: Tensor) -> Tensor:
    """Normalize x to length 1."""
    return x / x.norm().clamp(min=1e-12)

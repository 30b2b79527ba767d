"""Properties of the computed numbers: they match the semantics of the spec, and round no more than their dtype does."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx, nn

from tfkit.arguments import name_of
from tfkit.building.builder import build, inputs_of
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.component import Component, Layer, Layers, LearnedFactor, RopeScalingConfig, RotaryConfig, Scale
from tfkit.errors import SpecError
from tfkit.graph.expand import Graph, Node
from tfkit.graph.input_shapes import fixed_length, max_len
from tfkit.reference import BUILT_IN, Result, UnknownKind
from tfkit.reference import run as run_reference
from tfkit.tools.build.first_run import run_watched
from tfkit.tools.check.measure import (
    TOLERANCE,
    Deviation,
    DoesNotApplyError,
    Pair,
    bit_difference,
    first_difference,
    in_words,
    outputs_of,
    property_of,
    relative_distance,
    require,
    tensor_deviation,
    without_formula,
)
from tfkit.tools.check.model_under_test import LENGTH, ModelUnderTest, allow_rounding
from tfkit.tools.check.reduced import ROTARY_MAX_LEN
from tfkit.tools.check.runs import (
    Choices,
    Inputs,
    Padding,
    arguments_of,
    call,
    cast_inputs,
    example_inputs,
    temporary_hooks,
)
from tfkit.torch_private.tensors import tensors_in

Array = NDArray[np.float64]

FLOAT32, BFLOAT16 = 2e-6, 5e-2
"""The largest differences from float64, relative to the largest value if that is above 1."""
GROWTH = 20.0
"""Factor by which the rounding errors of late positions may exceed the errors of early positions."""
VECTOR_FACTOR = 1e3
"""Factor of the vectors that enter a stack."""


@property_of(
    "meaning", "computes what its spec describes", follows=("position-wise",), compares=lambda subject: "the arithmetic"
)
def reference_agreement(subject: ModelUnderTest) -> Iterator[Deviation]:
    """In float64, the outputs equal the outputs of `tfkit.reference`.

    Padded batches have as many rows as attention has heads: a mask over the wrong axis then broadcasts, and shows in
    the outputs. With scaled rotary positions, sequences are up to and above the original context length.
    """
    model = _converted_model(subject, torch.float64)
    weights = {name: tensor.numpy() for name, tensor in model.state_dict().items()}
    fused = _fused_parts(model)
    for values, limit in _reference_batches(subject):
        inputs = {name: x for name, x in cast_inputs(values, torch.float64).items() if name in inputs_of(model)}
        arrays = {name: x.numpy() for name, x in inputs.items()}
        try:
            expected = run_reference(subject.graph, weights, arrays, kinds=subject.functions, fused=fused)
        except UnknownKind as unknown:
            raise DoesNotApplyError(without_formula(_unknown_kinds(subject, unknown))) from None
        for output, (name, array) in zip(subject.run(inputs, model), expected.outputs.items(), strict=True):
            error = _distance_of_tokens(output, array, expected.real[name])
            detail = f"`{name}` differs from the reference of the spec by {error:.1e}"
            yield Deviation(error, detail, limit, where=partial(_differing_component, model, inputs, expected))


def _unknown_kinds(subject: ModelUnderTest, first: UnknownKind) -> Iterator[tuple[str, str]]:
    """Yield the slot and the name of each kind of a model that no function defines, `first` first."""
    yield first.slot, first.kind
    for _, config in subject.graph.configs(Component):
        slot, kind = config.slot, config.kind_name()
        if slot in BUILT_IN and kind not in {**BUILT_IN[slot], **subject.functions.get(slot, {})}:
            yield slot, kind


def _fused_parts(model: nn.Module) -> Mapping[str, Mapping[str, int]]:
    """Return the names and lengths of the parts of each module that is fused, by its path."""
    fused = defaultdict[str, dict[str, int]](dict)
    for name, location in tensor_locations_of(model).items():
        if location.length is not None:
            fused[location.parameter.rpartition(".")[0]][name.split(".")[-2]] = location.length
    return fused


def _reference_batches(subject: ModelUnderTest) -> Iterator[tuple[Inputs, float]]:
    """Yield the inputs for which a model is compared with its reference, with the largest error allowed."""
    scalings = [dict(scaling) for _, scaling in subject.graph.configs(RopeScalingConfig)]
    trained = {value for fields in scalings for name, value in fields.items() if name.endswith("max_len")}
    lengths = {*trained, subject.longest} if scalings else {subject.length}
    for length in sorted(lengths):
        yield subject.inputs(length=min(length, subject.longest)), TOLERANCE
    configs = [attending.config for attending in subject.attentions]
    if any(isinstance(config.position, RotaryConfig) for config in configs) and not fixed_length(subject.graph):
        limit = min(ROTARY_MAX_LEN, max_len(subject.graph) or ROTARY_MAX_LEN)
        # Angles are float32 in every model: their rounding errors grow with the position.
        yield subject.inputs(batch=1, length=limit), TOLERANCE * max(1, limit / LENGTH)
    sides: tuple[tuple[Padding, str], ...] = (("left", "n_heads"), ("right", "kv_heads"))
    for padding, name in sides if subject.padded else ():
        heads = max((getattr(config, name) for config in configs), default=1)
        yield subject.inputs(batch=heads if heads > 1 else 3, padding=padding), TOLERANCE


def _distance_of_tokens(output: Tensor, expected: Array, real: Array) -> float:
    tokens = torch.from_numpy(real)
    return (
        relative_distance(output[tokens], torch.from_numpy(expected)[tokens])
        if output.shape == expected.shape
        else math.inf
    )


def _differing_component(model: fx.GraphModule, inputs: Inputs, expected: Result) -> str:
    """Return the first component whose output differs; of a component that runs several times, the first run."""
    outputs, runs = outputs_of(model, partial(call, model, inputs)), defaultdict[str, int](int)
    tokens = {real.shape: real for real in expected.real.values()}
    for path, array in expected.trace:
        runs[path] += 1
        if path in outputs and runs[path] == 1:
            real = tokens.get(array.shape[:2], np.ones(array.shape[:1], bool))
            if outputs[path].shape == array.shape and _distance_of_tokens(outputs[path], array, real) > TOLERANCE:
                return path
    return ""


# ---- the residual stream ----


@property_of("zero-sublayers", "is its norms, if sublayers return zeros")
def silent_sublayers(subject: ModelUnderTest) -> Iterator[Deviation]:
    """With silent sublayers, the stream after each layer is what the spec's norms and residuals compute."""
    require(subject.stacks, "the spec has no stack")
    stacks = [node for node in subject.stacks if node.stack is not None and _is_additive(node.stack)]
    require(stacks, "no stack consists of additions and unconditioned norms")
    model, names, inputs = subject.model, [node.name for node in stacks], subject.inputs()
    sublayers = [f"{path}.{step.name}" for path, layer in subject.layers.items() for step in layer.steps]
    handles = [model.get_submodule(path).register_forward_hook(_silenced_output) for path in sublayers]
    with temporary_hooks(handles), torch.no_grad():
        stack_inputs = arguments_of(model, names, inputs)
        outputs = outputs_of(model, partial(call, model, inputs), [*subject.layers, *names])
        for node in stacks:
            yield from _silent_stack(model, node, stack_inputs[node.name][0], outputs)


def _silenced_output(_module: nn.Module, _args: Any, output: Any) -> Any:
    """Return zeros for the output of a sublayer, and its values for later sublayers unchanged."""
    return (torch.zeros_like(output[0]), *output[1:]) if isinstance(output, tuple) else torch.zeros_like(output)


def _is_additive(stack: Layers) -> bool:
    """Return True if all outputs are added to the stream, and no norm takes a condition."""
    steps = [step for layer in stack.layers for step in layer.steps]
    norms = [stack.final_norm, *(norm for step in steps for norm in (step.norm_in, step.norm_out, step.norm_after))]
    norms += [layer.input_norm for layer in stack.layers]
    reads = [*(step.read for step in steps), *(layer.around for layer in stack.layers)]
    return not any(reads) and not any(norm is not None and norm.takes_condition for norm in norms)


def _silent_stack(model: fx.GraphModule, node: Node, x: Tensor, outputs: Mapping[str, Tensor]) -> Iterator[Deviation]:
    stack = node.stack
    assert stack is not None
    detail = "{} whose sublayers return nothing differs from its norms by {{}}"
    runs = stack.runs
    for run, number in enumerate(runs):
        path = f"{node.name}.layers.{number}"
        x = _stream_after_layer(model.get_submodule(path), stack.layers[number], x)
        if number not in runs[:run]:
            yield tensor_deviation(outputs[path], x, detail.format("a layer"), where=path)
    if stack.final_norm is not None:
        x = model.get_submodule(f"{node.name}.final_norm")(x)
    yield tensor_deviation(outputs[node.name], x, detail.format("a stack"), where=node.name)


def _stream_after_layer(module: nn.Module, layer: Layer, x: Tensor) -> Tensor:
    """Return the stream after a layer whose sublayers return zeros."""
    for step in layer.steps:
        base, y = x, torch.zeros_like(x)
        if step.addition.onto == "normed" and step.norm_in is not None:
            base = module.get_submodule(f"{step.name}_norm_in")(x)
        if step.addition.onto == "nothing":
            base = torch.zeros_like(x)
        if step.onto is not None:
            base = base * module.get_parameter(f"{step.onto.name}.weight")
        if step.norm_out is not None:
            y = module.get_submodule(f"{step.name}_norm_out")(y)
        for part in step.branch():
            if isinstance(part, LearnedFactor):
                y = y * module.get_parameter(f"{part.name}.weight")
            elif isinstance(part, Scale):
                y = y * part.number
        x = step.addition.scale_onto * base + y
        if step.after is not None:
            x = module.get_submodule(step.after.name)(x)
    return x


# ---- types ----


@property_of("types", "computes in bfloat16", of_spec=True)
def bfloat16_outputs(subject: ModelUnderTest) -> Iterator[Deviation]:
    """A model in bfloat16 returns finite outputs in bfloat16."""
    yield from computes_in(subject.graph, torch.bfloat16)


def computes_in(graph: Graph, dtype: torch.dtype) -> Iterator[Deviation]:
    """Build a model in a different dtype, and find outputs of the wrong dtype or that are not finite."""
    inputs = cast_inputs(example_inputs(graph), dtype)
    try:
        model = build(graph, dtype=dtype).eval()
        run_watched(model, {name: x for name, x in inputs.items() if name in inputs_of(model)})
    except SpecError as error:
        yield Deviation.fault(f"a model of {dtype} fails: {in_words(error)}")
        return
    with torch.no_grad():
        for output in call(model, inputs):
            if output.dtype != dtype:
                yield Deviation.fault(f"a model of {dtype} returns {output.dtype}")
            if not output.isfinite().all():
                yield Deviation.fault(f"a model of {dtype} returns values that are not finite")


def _converted_model(subject: ModelUnderTest, dtype: torch.dtype) -> fx.GraphModule:
    return copy.deepcopy(subject.model).to(dtype)


@property_of("rounding", "rounds no more than its type", follows=("types",))
def rounding_errors(subject: ModelUnderTest) -> Iterator[Deviation]:
    """float32 and bfloat16 differ from float64 only by rounding, and float32 rounds equally at every position.

    All three select the same experts. A model may be sensitive to rounded weights: it may then differ by twice the
    change of its outputs when its weights are rounded.
    """
    exact, inputs, choices = _converted_model(subject, torch.float64), subject.inputs(), Choices()

    def run(model: fx.GraphModule, dtype: torch.dtype) -> list[Tensor]:
        with choices:
            return subject.run(cast_inputs(inputs, dtype), model)

    expected = run(exact, torch.float64)
    for dtype, limit in ((torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)):
        model = _converted_model(subject, dtype)
        runs = partial(run, exact, torch.float64), partial(run, model, dtype)
        where = partial(first_difference, exact, *runs, _in_float64, second=model, limit=limit)
        for exact_output, output in zip(expected, run(model, dtype), strict=True):
            error = _relative_error(output.double(), exact_output)
            detail = f"{name_of(dtype)} differs from float64 by {error:.1e}, but rounding explains {limit:g}"
            deviation = Deviation(error, detail, limit, where)
            yield from allow_rounding(subject, [deviation], dtype, _relative_error, runs=1)
            if dtype == torch.float32 and output.dim() == 3 and output.size(1) > 4:
                yield _error_growth(output.double(), exact_output)


def _relative_error(output: Tensor, exact: Tensor) -> float:
    """Return the root mean square of the error, relative to the values, since single values cancel."""
    error = (output - exact).square().mean().sqrt() / exact.square().mean().sqrt().clamp(min=1e-9)
    return float("inf") if error.isnan() else float(error)


def _in_float64(exact: Tensor, output: Tensor) -> Pair:
    return output.double(), exact.double()


def _error_growth(output: Tensor, exact: Tensor) -> Deviation:
    """Compare the error of the last quarter of positions with the error of the first quarter."""
    part = exact.size(1) // 4
    first, last = (_relative_error(output[:, s], exact[:, s]) for s in (slice(part), slice(-part, None)))
    factor = last / max(first, 1e-8)
    detail = f"float32 rounds late positions {factor:.0f} times as much as early ones"
    return Deviation(max(0.0, factor - GROWTH), detail)


@property_of("large", "stays finite at large numbers", follows=("types",))
def large_inputs(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Outputs and gradients stay finite if the input of a stack is 1000 times as large, and outputs in float16."""
    require(subject.stacks, "the spec has no stack")
    model, where = copy.deepcopy(subject.model), f"where a stack's input is {VECTOR_FACTOR:g} times as large"
    for stack in subject.stacks:
        model.get_submodule(stack.name).register_forward_pre_hook(lambda _, args: (args[0] * VECTOR_FACTOR, *args[1:]))
    outputs = call(model, subject.inputs())
    torch.stack([output.square().mean() for output in outputs]).sum().backward()
    infinite = [name for name, p in model.named_parameters() if p.grad is not None and not p.grad.isfinite().all()]
    if not all(output.isfinite().all() for output in outputs):
        yield Deviation.fault(f"outputs are not finite {where}")
    elif infinite:
        yield Deviation.fault(f"the gradient of `{infinite[0]}` is not finite {where}", infinite[0].rpartition(".")[0])
    half = _converted_model(subject, torch.float16)
    for output in subject.run(cast_inputs(subject.inputs(), torch.float16), half):
        if not output.isfinite().all():
            yield Deviation.fault("a model of torch.float16 returns values that are not finite")
    yield Deviation(0.0, "")


@property_of("unchanged-inputs", "changes none of its input tensors")
def inputs_unchanged(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The tensors that a module takes have equal bits before and after its forward."""
    received, changed = dict[str, list[Tensor]](), dict[str, float]()

    def before(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        received[path] = [x.clone() for x in _nested_tensors((args, kwargs))]

    def after(path: str, _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], _output: Any) -> None:
        for x, old in zip(_nested_tensors((args, kwargs)), received.pop(path), strict=True):
            if error := bit_difference(x, old):
                changed.setdefault(path, error)

    modules = [(path, module) for path, module in subject.model.named_modules() if path]
    handles = [module.register_forward_pre_hook(partial(before, path), with_kwargs=True) for path, module in modules]
    handles += [module.register_forward_hook(partial(after, path), with_kwargs=True) for path, module in modules]
    with temporary_hooks(handles):
        subject.run(subject.inputs(padding="left"))
    for path, error in changed.items():
        yield Deviation(error, f"`{path}` changes its input by {error:.1e}", 0.0, path)
    yield Deviation(0.0, "")


def _nested_tensors(nested: Any) -> list[Tensor]:
    return list(tensors_in(nested))

"""Properties of isolation: the tokens, rows and documents that an output may depend on."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import compress

import torch
from torch import Tensor, fx, nn

from tfkit.building.builder import evaluation_mode, graph_of, inputs_of
from tfkit.component import Component, InputPositionConfig, MaskConfig, SublayerConfig
from tfkit.errors import listing
from tfkit.graph.decode_split import computes_alone, memory_field, reduce_to_output
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_length
from tfkit.graph.wiring import node_ignoring_pairs, pairwise_masks
from tfkit.nn import StackedLinear
from tfkit.nn.checked import check_length
from tfkit.spec.messages import kind_of
from tfkit.tools.check.measure import (
    TOLERANCE,
    Deviation,
    DoesNotApplyError,
    Pair,
    first_difference,
    output_deviations,
    position_slice,
    property_of,
    relative_distance,
    require,
    tensor_deviation,
)
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.runs import Inputs, arguments_of, call, eval_outputs, padding_mask, temporary_hooks

ALONE = ("activation", "ffn", "norm")
"""The slots of components that act on each position independently."""
DOCUMENTS = (5, 4, 3)
"""Tokens of the documents that share a row."""


@property_of("position-wise", "mixes positions in attention only")
def position_independence(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Activations, norms and FFNs act on each position independently, however many positions there are."""
    yield from positions_alone(subject.model, subject.inputs())


def positions_alone(model: fx.GraphModule, inputs: Inputs) -> Iterator[Deviation]:
    """Find activations, norms and FFNs that mix positions or rows, or depend on their number."""
    components: dict[str, Component] = model.meta["components"]
    paths = [path for path, component in components.items() if component.slot in ALONE and not _takes_more(component)]
    with evaluation_mode(model), torch.no_grad():
        for path, (x, *_) in arguments_of(model, paths, inputs).items():
            if x.dim() == 3:
                component = components[path]
                name = f"{kind_of(type(component))} `{component.kind_name()}`, `{path}`"
                yield from _position_mixing(model.get_submodule(path), x, name, path)


def _takes_more(component: Component) -> bool:
    """Return True if the module also takes the context: it need not compute each position independently."""
    return component.takes_condition or (isinstance(component, SublayerConfig) and component.takes_context)


def _position_mixing(module: nn.Module, x: Tensor, name: str, path: str) -> Iterator[Deviation]:
    """Measure how much a module mixes positions or rows of x [b, t, d]."""
    y, cut = module(x), x.size(1) // 2
    other = x.roll(1, dims=0)
    ahead = module(torch.cat((x[:, :cut], other[:, cut:]), dim=1))[:, :cut]
    back = module(torch.cat((other[:, :cut], x[:, cut:]), dim=1))[:, cut:]
    fewer, row = module(x[:, :cut]), module(x[:1])
    for result, expected, detail in (
        (ahead, y[:, :cut], "looks ahead: positions change by {} with those after them"),
        (back, y[:, cut:], "looks back: positions change by {} with those before them"),
        (fewer, y[:, :cut], "depends on the number of positions: among fewer, they change by {}"),
        (row, y[:1], "mixes the rows of a batch: alone, one changes by {}"),
    ):
        yield tensor_deviation(result, expected, f"{name}, {detail}", where=path)


# ---- later tokens ----


def _causal_inputs(subject: ModelUnderTest) -> tuple[str, ...]:
    require(subject.causal, "every position may read all others")
    return subject.causal


@property_of("look-ahead", "reads no later token", follows=("position-wise", "memory"))
def look_ahead(subject: ModelUnderTest) -> Iterator[Deviation]:
    """No earlier output changes with a later token."""
    for name in _causal_inputs(subject):
        yield from later_values(subject.model, subject.inputs(), name)


@property_of(
    "look-ahead-gradient", "has no gradient to later tokens", follows=("position-wise", "memory", "look-ahead")
)
def look_ahead_gradient(subject: ModelUnderTest) -> Iterator[Deviation]:
    """No output has a gradient to a later token."""
    for name in _causal_inputs(subject):
        yield from later_gradients(subject.model, subject.inputs(), name)


def later_values(model: fx.GraphModule, inputs: Inputs, name: str) -> Iterator[Deviation]:
    """Compare earlier outputs [b, t, ...] when later tokens of an input are replaced by tokens of another row."""
    x = inputs[name]
    with evaluation_mode(model), torch.no_grad():
        outputs = call(model, inputs)
        for t in range(1, x.size(1)):
            changed = {**inputs, name: torch.cat((x[:, :t], x[:, t:].roll(1, dims=0)), dim=1)}
            runs = partial(call, model, inputs), partial(call, model, changed)
            where = partial(first_difference, model, *runs, position_slice(slice(t)))
            detail = f"the model looks ahead: outputs before position {t} change by {{}} with `{name}` from {t} on"
            for before, after in zip(outputs, call(model, changed), strict=True):
                yield tensor_deviation(after[:, :t], before[:, :t], detail, where=where)


def later_gradients(model: fx.GraphModule, inputs: Inputs, name: str) -> Iterator[Deviation]:
    """Find gradients of outputs [b, t, ...] to later tokens of an input."""
    x = inputs[name]
    with evaluation_mode(model), _gradient_leaves(model, name) as leaves:
        if x.is_floating_point():
            leaves.append(x.detach().requires_grad_())
            inputs = {**inputs, name: leaves[0]}
        outputs = call(model, inputs)
    needed = [name in reduce_to_output(graph_of(model), output).inputs for output in graph_of(model).outputs]
    for output in compress(outputs, needed):
        weights = torch.randn(output.shape[2:], generator=torch.Generator().manual_seed(0))  # norms hide plain sums
        for t in range(x.size(1)):
            total = (output[:, t] * weights).sum()
            grads: Sequence[Tensor | None] = torch.autograd.grad(total, leaves, retain_graph=True, allow_unused=True)
            nonzero = [grad for grad in grads if grad is not None and grad.any()]
            if not nonzero:
                yield Deviation.fault(f"output {t} has no gradient to any token of `{name}`")
                return
            leak = max(relative_distance(grad[:, t + 1 :], torch.zeros(1)) for grad in nonzero)
            why = f"output {t} has a gradient of {leak:.1e} to later tokens of `{name}`"
            yield Deviation(leak, f"the model looks ahead: {why}")


@contextmanager
def _gradient_leaves(model: fx.GraphModule, name: str) -> Iterator[list[Tensor]]:
    """Collect the outputs of the modules that read the tokens `name`, as leaves of the gradient."""
    leaves: list[Tensor] = []

    def hook(_module: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        if args[0].is_floating_point():
            return output
        leaves.append(output.detach().requires_grad_())
        return leaves[-1]

    (tokens,) = model.graph.find_nodes(op="placeholder", target=name)
    checked = [user for user in tokens.users if user.target is check_length]
    readers = [user for node in (tokens, *checked) for user in node.users if user.op == "call_module"]
    with temporary_hooks(model.get_submodule(str(user.target)).register_forward_hook(hook) for user in readers):
        yield leaves


# ---- padding, rows and documents ----


@property_of("padding", "is not changed by padding", follows=("position-wise", "look-ahead"))
def padding_independence(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Outputs of tokens do not depend on the amount or the contents of the padding in their row."""
    require(subject.padded, "no input may be padded")
    _require_separate_rows(subject)
    between = next((node.name for node in subject.graph.nodes if node.output.gaps), None)
    require(between is None, f"`{between}` puts padding between tokens; `meaning` compares these")
    yield from padded_rows(subject.model, subject.inputs())


def padded_rows(model: fx.GraphModule, inputs: Inputs) -> Iterator[Deviation]:
    """Compare the outputs of tokens next to different amounts of padding with the outputs of each row alone."""
    signals = graph_of(model).inputs
    sequences = [name for name in signals if name in inputs and signals[name].mask]
    if any(signals[name].length is not None for name in sequences):
        yield from _contents_of_padding(model, inputs, sequences)
        return
    positions = [name for name in signals if name in inputs and signals[name].type == "positions"]
    for side in ("right", "left") if any(f"{name}_mask" in inputs_of(model) for name in sequences) else ():
        padded = dict(inputs)
        padded |= {name: _padded_sequences(inputs[name], side)[0] for name in positions}
        for name in sequences:
            padded[name], padded[f"{name}_mask"] = _padded_sequences(inputs[name], side)
        detail = f"padding on the {side} changes the outputs of tokens by {{}}"
        for row in range(padded[sequences[0]].size(0)):
            single = {name: x[row : row + 1] for name, x in inputs.items()}
            single |= {n: single[n][:, : max(1, inputs[n].size(1) - row)] for n in (*sequences, *positions)}
            for deviation in output_deviations(model, single, padded, detail, partial(_row_outputs, row, side)):
                cause = _cause_of_padding(model, padded, sequences, side) if deviation.broken else ""
                yield replace(deviation, detail=f"{deviation.detail}{cause}")


def _contents_of_padding(model: fx.GraphModule, inputs: Inputs, sequences: Sequence[str]) -> Iterator[Deviation]:
    """Change the contents of padding in sequences of a fixed length, which cannot have more padding."""
    for side in ("right", "left"):
        masks = {name: padding_mask(len(inputs[name]), inputs[name].size(1), side) for name in sequences}
        padded = {**inputs, **{f"{name}_mask": mask for name, mask in masks.items()}}
        changed = padded | {name: _with_other_padding(inputs[name], mask) for name, mask in masks.items()}
        detail = f"the contents of padding on the {side} change the outputs of tokens by {{}}"
        yield from output_deviations(model, padded, changed, detail, partial(_token_outputs, [*masks.values()]))


def _with_other_padding(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask.view(*mask.shape, *[1] * (x.dim() - 2)), x, x.roll(1, dims=0))


def _token_outputs(masks: Sequence[Tensor], before: Tensor, after: Tensor) -> Pair:
    tokens = next((mask for mask in masks if mask.shape == before.shape[:2]), slice(None))
    return before[tokens], after[tokens]


def _cause_of_padding(model: fx.GraphModule, padded: Inputs, sequences: Sequence[str], side: str) -> str:
    """Return whether the contents of padding change the outputs of tokens, or only its amount."""
    changed, masks = dict(padded), [padded[f"{name}_mask"] for name in sequences]
    for name, mask in zip(sequences, masks, strict=True):
        changed[name] = _with_other_padding(padded[name], mask)
    for outputs in zip(eval_outputs(model, padded), eval_outputs(model, changed), strict=True):
        before, after = _token_outputs(masks, *outputs)
        if not relative_distance(after, before) <= TOLERANCE:
            return ", and so do its contents: it is not masked"
    counted = ": positions count it, as absolute positions do" if side == "left" else ""
    return f", whatever it contains{counted}"


def _padded_sequences(x: Tensor, side: str) -> tuple[Tensor, Tensor]:
    """Append two positions to x; each row has one token fewer than the row above, then arbitrary values."""
    length = x.size(1) + 2
    rubbish = torch.cat((x, x), dim=1).roll(1, dims=0)[:, :length]
    rows, mask = rubbish.clone(), torch.zeros(x.size(0), length, dtype=torch.bool)
    for row in range(x.size(0)):
        real = max(1, x.size(1) - row)
        location = slice(0, real) if side == "right" else slice(length - real, length)
        rows[row, location], mask[row, location] = x[row, :real], True
    return rows, mask


def _row_outputs(row: int, side: str, single: Tensor, padded: Tensor) -> Pair | None:
    """Return the output of a row alone, and the outputs of its tokens in an output padded at `side`."""
    if padded.dim() < 2 or single.dim() != padded.dim() or single.size(0) != 1:
        return None
    if padded.dim() == 2 and single.size(1) == padded.size(1):  # a vector, or a row without padding
        return single[0], padded[row]
    extra = padded.size(1) - single.size(1)
    return single[0], padded[row, : single.size(1)] if side == "right" else padded[row, extra:]


def _require_separate_rows(subject: ModelUnderTest) -> None:
    comparing = [node.name for node in subject.graph.nodes if node.config.compares_rows]
    require(not comparing, f"`{listing(comparing)}` compares the rows of a batch")


@property_of("neighbours", "reads each row by itself", follows=("position-wise",))
def row_independence(subject: ModelUnderTest) -> Iterator[Deviation]:
    """No bit of a row depends on the other rows of a batch; experts, which batch tokens of all rows, may round."""
    _require_separate_rows(subject)
    experts = any(isinstance(module, StackedLinear) for module in subject.model.modules())
    inputs, different = subject.inputs(), subject.inputs(seed=1)
    mixed = {name: torch.cat((x[:1], different[name][1:])) for name, x in inputs.items()}
    single = {name: x[:1] for name, x in inputs.items()}
    order = {name: x.roll(1, dims=0) for name, x in inputs.items()}
    for changed, detail, align, limit in (
        (
            mixed,
            "beside other rows, the first one of a batch changes by {}",
            _first_rows,
            TOLERANCE if experts else 0.0,
        ),
        (order, "in another order, rows change by {}", _rows_in_order, TOLERANCE),
        (single, "alone, the first row of a batch changes by {}", _first_rows, TOLERANCE),
    ):
        yield from output_deviations(subject.model, inputs, changed, detail, align, limit=limit)


def _first_rows(rows: Tensor, changed: Tensor) -> Pair | None:
    """Return the first row of two batches."""
    batches = rows.dim() > 1 and rows.dim() == changed.dim() and rows.size(0) > 1
    return (rows[:1], changed[:1]) if batches and changed.size(0) in (1, rows.size(0)) else None


def _rows_in_order(rows: Tensor, rolled: Tensor) -> Pair | None:
    """Return the rows of two batches, the second in the order of the first."""
    return (rows, rolled.roll(-1, dims=0)) if rows.dim() > 1 and rows.size(0) > 1 else None


@property_of("documents", "keeps documents in one row apart", follows=("extents", "padding"))
def document_independence(subject: ModelUnderTest) -> Iterator[Deviation]:
    """With a pairwise mask, each of several documents in a row has the same outputs as alone in its row.

    All documents of a decoder attend to the same memory, because the mask of a memory is not pairwise.
    """
    names = _inputs_of_documents(subject.graph)
    require(subject.length >= sum(DOCUMENTS), "its inputs are short")
    require(fixed_length(subject.graph) is None, "its sequences have a fixed length")
    inputs = subject.inputs(batch=1, length=sum(DOCUMENTS))
    of = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS))
    masks = {f"{name}_mask" for name in names} & {*inputs_of(subject.model)}
    together = {**inputs, **dict.fromkeys(masks, (of[:, None] == of)[None])}
    detail = "a document in a row with others changes by {}"
    for columns in torch.arange(len(of)).split(DOCUMENTS):
        document = slice(int(columns[0]), int(columns[-1]) + 1)
        single = {**inputs, **{name: inputs[name][:, document] for name in names}}
        yield from output_deviations(subject.model, single, together, detail, partial(_document_outputs, document))


def _inputs_of_documents(graph: Graph) -> list[str]:
    """Return the inputs that contain documents: all inputs, or the only input next to a memory."""
    memories = {node.wires[field] for node in graph.nodes if node.stack is not None and (field := memory_field(node))}
    if not memories:
        deaf = node_ignoring_pairs(graph)
        require(deaf is None, f"`{deaf}` takes no pairwise mask")
        apart = all(signal.mask or signal.type == "positions" for signal in graph.inputs.values())
        require(apart, "it has inputs without positions")
        return [*graph.inputs]
    pairs = pairwise_masks(graph.nodes)
    names = [name for name, signal in graph.inputs.items() if signal.mask in pairs and name not in memories]
    require(len(names) == 1 and len(graph.inputs) == 2, "it has more inputs than a sequence and a memory")
    return names


def _document_outputs(columns: slice, single: Tensor, together: Tensor) -> Pair | None:
    return (single, together[:, columns]) if together.dim() > 2 else None


@property_of("token-order", "moves its outputs with its tokens", follows=("position-wise",))
def token_order(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Without positions, tokens in another order have their outputs in that order."""
    positions = any(True for _ in subject.graph.configs(InputPositionConfig))
    positions = positions or any(attention.config.position is not None for attention in subject.attentions)
    require(not positions, "the spec has positions")
    features = any(attention.config.takes_features for attention in subject.attentions)
    require(not features, "an attention takes features, which may belong to pairs of tokens")
    for node in subject.graph.nodes:
        ordered = node.stack is None and node.output.type in ("sequence", "vector") and not computes_alone(node)
        recurrent = node.stack is not None and node.stack.keeps_state
        require(not (ordered or recurrent), f"`{node.name}` may read the order of its input")
    limited = any(attention.step.mask not in (None, MaskConfig()) for attention in subject.attentions)
    require(not (limited or subject.causal), "attention is limited by the order of tokens")
    if any(node.output.type == "logits" and node.output.width is None for node in subject.graph.nodes):
        raise DoesNotApplyError("logits without an axis of classes look like vectors")
    inputs = subject.inputs()
    vectors = [name for name, signal in subject.graph.inputs.items() if signal.type == "vector"]
    turned = {name: x.flip(1) if x.dim() > 1 and name not in vectors else x for name, x in inputs.items()}
    detail = "tokens in reverse order change their outputs by {}"
    yield from output_deviations(
        subject.model, inputs, turned, detail, lambda a, b: (a, b.flip(1) if b.dim() > 2 else b)
    )

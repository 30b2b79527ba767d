"""Building the modules that transformers requires: a body, which returns vectors, and a head for logits.

A body takes the vectors of the tokens, which users of transformers may compute, or an image, or features. For decoding,
a decoder also takes a `Past`, which counts earlier tokens, and the caches of its layers. A body contains the modules of
its nodes. The head contains the modules of the last nodes, with the output matrix as `lm_head` or `classifier`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, fx, nn
from torch.nn import functional as F

from tfkit.building.builder import write_call
from tfkit.checkpoint.remote_code import BODY, MATRIX, matrix_name
from tfkit.component import Decoding
from tfkit.graph.expand import Graph, Node
from tfkit.graph.wiring import masks_in_use
from tfkit.nn import Linear, Past, Program, Table, Value
from tfkit.nn.forward_text import Operation
from tfkit.nn.program import Steps, Written, written_class
from tfkit.tools.eject.remote_code.parts import Body, Parts, last_sequence, unsupported_error


def separated_model(model: fx.GraphModule, parts: Parts, name: str) -> nn.Module:
    """Build the head of a model, with the body as its child `BODY`; or only the body if there is no head.

    Args:
        model: the model, whose modules the result shares.
        parts: its nodes.
        name: the prefix of the names of the classes.
    """
    modules = {body.name: _body_module(model, body, parts, f"{name}{body.class_end}") for body in parts.bodies}
    root = modules.get("")
    if root is None:
        root = type(f"{name}Model", (nn.Module,), {})()
        for child, module in modules.items():
            root.add_module(child, module)
    if not parts.head:
        return root
    head = _head_module(model, parts, f"{name}{parts.task.class_name}")
    head.add_module(BODY, root)
    return head


def _body_module(model: fx.GraphModule, body: Body, parts: Parts, class_name: str) -> fx.GraphModule:
    """Build a body: input and optional masks, token types, memory, `Past` and caches -> vectors."""
    program, graph = Program(), parts.graph
    values: dict[str, Value] = {body.input: program.input("x")}
    values |= {body.mask_name: program.input("mask", optional=True)} if body.mask_name else {}
    values |= {body.types: program.input("types", optional=True)} if body.types else {}
    if body.memory is not None:
        values[body.memory] = program.input("memory", optional=True)  # None once it is in the caches
        if (mask := graph.node(body.memory).output.mask) in masks_in_use(body.nodes) and mask is not None:
            values[mask] = program.input("memory_mask", optional=True)
    further: dict[str, Value] = {}
    if body.decodes:
        further = {"past": program.input("past", Past, optional=True)}
        further["caches"] = program.input("caches", list[list[Tensor]], optional=True)
    if body.memory is not None:
        further["memory_caches"] = program.input("memory_caches", list[list[Tensor]], optional=True)
    for original in body.nodes:
        node, module = original, model.get_submodule(original.name)
        if original is body.embedding:
            node, module = _of_vectors(graph, node, module)
        decoding = node.config.decoding(node.signals) if body.decodes else Decoding()
        taken = {name: value for name, value in further.items() if getattr(decoding, name)}
        values |= write_call(program, graph, node, module, values, **taken)
    outputs = [last_sequence(body), *([parts.vector] if parts.vector else [])]
    results = tuple(values[node.name] for node in outputs)
    return program.build_graph_module(results if len(results) > 1 else results[0], class_name)


def _of_vectors(graph: Graph, node: Node, module: nn.Module) -> tuple[Node, nn.Module]:
    """Return an embedding that takes vectors instead of tokens. Its table stays, for the callers."""
    embedding, children = _written_module(graph, node, module, "tokens"), dict(module.named_children())
    steps = dict(embedding.steps)
    lookup = _lookup_step(steps, "tokens")
    ids = next(value for value, step in steps.items() if step.op == "placeholder")
    table = next((value for value, step in steps.items() if step.op == "placeholder" and step.name == "tie"), None)
    if table is not None:
        children["tokens"] = _embedding_table(node)
        del steps[table]
    used = {argument for value, step in steps.items() if value != lookup for argument in step.args}
    unused = [value for value in steps if value in steps[lookup].args and value not in used and value != ids]
    steps[ids] = steps[ids]._replace(name="x", target="x")
    del steps[lookup]
    for value in unused:  # the check of the length
        del steps[value]
    renamed = {lookup: ids}
    steps = {
        value: step._replace(args=tuple(renamed.get(argument, argument) for argument in step.args))
        for value, step in steps.items()
    }
    result = written_class(steps, type(embedding).__name__)()
    for name, child in children.items():
        result.add_module(name, child)
    wires = {field: source for field, source in node.wires.items() if field != "tie"}
    return replace(node, wires=wires), result


def _head_module(model: fx.GraphModule, parts: Parts, class_name: str) -> fx.GraphModule:
    """Build the head: vectors -> logits. A tied matrix also becomes a linear layer."""
    program, (*first, last), graph = Program(), parts.head, parts.graph
    values: dict[Any, Value] = {parts.last.nodes[-1].name: program.input("x")}
    mask = graph.inputs[parts.last.input].mask
    if mask in masks_in_use(parts.head):
        values[mask] = program.input("mask", optional=True)
    for node in first:
        values |= write_call(program, graph, node, model.get_submodule(node.name), values)
    module, name = _written_module(graph, last, model.get_submodule(last.name), MATRIX), matrix_name(last)
    output: Value | None = None
    for value, step in module.steps.items():
        args = [values.get(argument, argument) for argument in step.args]
        if step.op == "placeholder" and step.name != "tie":
            values[value] = values[last.wires["input"]]
        elif step.op == "call_module" and step.target == MATRIX:
            matrix = module.get_submodule(MATRIX)
            if "tie" in last.wires:
                matrix = _output_matrix(last, bias=matrix.bias is not None)
            values[value] = program.call(name, matrix, args[0])
        elif step.op == "call_module":
            values[value] = program.call(step.target, module.get_submodule(step.target), *args)
        elif step.op == "call_function":
            values[value] = program.apply(step.name, step.target, *args, **step.kwargs)
        elif step.op == "output":
            output = values[step.args[0]]
    return program.build_graph_module(output, class_name)


def _written_module(graph: Graph, node: Node, module: nn.Module, child: str) -> Written:
    """Return the module of a node. Raise SpecError unless tfkit wrote its code, and the code calls `child`."""
    if isinstance(module, Written) and any(_looks_up(step, child) for step in module.steps.values()):
        return module
    raise unsupported_error(
        graph, f"the module of `{node.name}` has no `{child}`, to which transformers gives new rows"
    )


def _lookup_step(steps: Steps, child: str) -> Value:
    """Return the step that calls a child, or that uses the table of a tied child."""
    return next(value for value, step in steps.items() if _looks_up(step, child))


def _looks_up(step: Operation, child: str) -> bool:
    if step.op == "call_function":
        return child == "tokens" and step.target is F.embedding
    return step.op == "call_module" and step.target == child


def _embedding_table(embedding: Node) -> Table:
    """Build a table for an embedding whose table is tied."""
    table = embedding.config.table()
    assert table is not None
    assert table.rows is not None
    assert table.width is not None
    return Table(table.rows, table.width)


def _output_matrix(head: Node, *, bias: bool) -> Linear:
    """Build a matrix for a head whose matrix is tied."""
    table, logits = head.signals["tie"], head.config.output(head.signals)
    assert not isinstance(table, list)
    assert table.width is not None
    assert logits.width is not None
    return Linear(table.width, logits.width, bias=bias)

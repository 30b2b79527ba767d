"""A graph as a scene: its nodes in columns, their contents and parameters, and the wires between them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tfkit.component import Call, Component, Dropout, Lookup, PositionConfig, Projection, Scale, Signal
from tfkit.graph.decode_split import wire_of
from tfkit.graph.expand import Graph, Node, as_list
from tfkit.tools.draw.parameter_counts import ParameterCounts
from tfkit.tools.draw.scene import Added, Box, Chain, Chip, Mark, Note, Scene, Wire
from tfkit.tools.draw.stack_scene import chips_of, norm_box, notes_of, stack_tower, tip_of
from tfkit.tools.show.resolved_values import number_text

SIZES = ("d_model", "vocab_size", "max_len")


def scene_of(graph: Graph) -> Scene:
    """Build the scene of a graph. The parameters of its boxes add up to the parameters of the model."""
    counts = ParameterCounts(graph)
    side_inputs = {
        name: f"{name} {_axes_text(graph.inputs[name])}" for node in graph.nodes for name in _side_inputs(graph, node)
    }
    columns = _node_columns(graph)
    lowest = {column[0] for column in columns} - side_inputs.keys()
    nodes: dict[str, Any] = {name: Chain(f"input/{name}", text, ()) for name, text in side_inputs.items()}
    for node, key in zip(graph.nodes, _node_keys(graph), strict=True):
        if node.module != node.name:
            nodes[node.name] = Chain(key, node.name, (_shared_box(node, key),))
        elif node.stack is not None:
            nodes[node.name] = stack_tower(node, node.stack, key, counts)
        else:
            nodes[node.name] = _node_chain(node, key, counts)
    model = graph.spec.model
    return Scene(
        name=graph.name,
        description=model.description or "",
        source=model.source or "",
        facts=tuple(_size_notes(graph)),
        total=counts.total,
        nodes=nodes,
        columns=columns,
        wires=tuple(_scene_wires(graph, columns, nodes)),
        inputs={name: text for name in lowest if (text := _input_text(graph, graph.node(name)))} | side_inputs,
        outputs={name: _output_text(graph.node(name)) for name in graph.outputs},
    )


def _node_keys(graph: Graph) -> list[str]:
    """Return the key of each node, by which pictures are compared: the kind of its block, and its index in the kind."""
    seen: dict[str, int] = {}
    keys = []
    for node in graph.nodes:
        kind = node.config.kind_name()
        seen[kind] = seen.get(kind, 0) + 1
        keys.append(f"{kind}{seen[kind]}")
    return keys


def _size_notes(graph: Graph) -> Iterator[Note]:
    for name in SIZES:
        configured = (dict(node.config).get(name) for node in graph.nodes)
        values = sorted({value for value in configured if value is not None})
        if values:
            text = " / ".join(f"{value:,}" for value in values)
            yield Note(name, f"{name.removesuffix('_size')} {text}")


def _main_source(node: Node) -> str | None:
    """Return the source drawn below a node."""
    source = node.wires.get("input") or node.wires.get("inputs")
    return as_list(source)[0] if source else None


def _side_inputs(graph: Graph, node: Node) -> Iterator[str]:
    """Yield the model inputs drawn at the side of a node. Tables that read an input are drawn as boxes."""
    main = _main_source(node)
    for field, source in node.wires.items():
        if not isinstance(getattr(node.config, field), Mapping):
            yield from (name for name in as_list(source) if name in graph.inputs and name != main)


def _node_columns(graph: Graph) -> tuple[tuple[str, ...], ...]:
    """Arrange nodes in columns.

    A node is placed above its first input, or in a new column if another node is already above that input.
    """
    columns: list[list[str]] = []
    for node in graph.nodes:
        columns += [[name] for name in _side_inputs(graph, node) if all(name not in column for column in columns)]
        below = next((column for column in columns if column[-1] == _main_source(node)), None)
        if below is None:
            columns.append([node.name])
        else:
            below.append(node.name)
    return tuple(map(tuple, columns))


def _scene_wires(graph: Graph, columns: tuple[tuple[str, ...], ...], nodes: Mapping[str, Any]) -> Iterator[Wire]:
    """Yield all wires except those from a node to the node above it."""
    lowest = {column[0] for column in columns}
    for node in graph.nodes:
        main, side_inputs = _main_source(node), set(_side_inputs(graph, node))
        boxes = list(nodes[node.name].boxes())
        for field, source in node.wires.items():
            wire = wire_of(node, field)
            for index, name in enumerate(as_list(source)):
                if wire.value == "module" or (name in graph.inputs and name not in side_inputs):
                    continue
                if wire.value == "table":
                    user = next((box.key for box in boxes if box.tied), boxes[-1].key)
                    yield Wire(_lowest_table_user(graph, columns, name, node.name), node.name, "tie", user)
                elif name == main and field in ("input", "inputs") and index == 0:
                    if node.name in lowest:
                        yield Wire(name, node.name, "up")
                elif wire.static and wire.mask:
                    crossed = [box.key for box in boxes if box.role == "cross_attention"] or [boxes[0].key]
                    yield from (Wire(name, node.name, "memory", key) for key in crossed)
                else:
                    yield Wire(name, node.name, "side", boxes[0].key)


def _lowest_table_user(graph: Graph, columns: tuple[tuple[str, ...], ...], table: str, target: str) -> str:
    """Return the lowest node below the target, in the same column, that uses a table; else the owner of the table."""
    ties = [(node, field) for node in graph.nodes for field, source in node.wires.items() if source == table]
    users = {table, *(node.name for node, field in ties if wire_of(node, field).value == "table")}
    column = next(column for column in columns if target in column)
    return next((name for name in column[: column.index(target)] if name in users), table)


def _input_text(graph: Graph, node: Node) -> str:
    """Return the input below a node, with its axes."""
    name = _main_source(node)
    if name is None or name not in graph.inputs:
        return ""
    return f"{name} {_axes_text(graph.inputs[name])}"


def _output_text(node: Node) -> str:
    read = node.signals.get("input")
    flat = node.output.type == "vector" or (isinstance(read, Signal) and read.type == "vector")
    return f"{node.output.type} {_axes_text(node.output).replace(', t', '') if flat else _axes_text(node.output)}"


def _axes_text(signal: Signal) -> str:
    if signal.type == "lengths":
        return "[b]"
    if signal.type == "image":
        return f"[b, {signal.channels}, {signal.rows}, {signal.width}]"
    if signal.type == "images":
        return f"[b, n, {signal.channels}, {signal.rows}, {signal.width}]"
    if signal.type == "vector":
        return f"[b, {signal.width:,}]"
    return "[b, t]" if signal.width is None else f"[b, t, {signal.width:,}]"


def _shared_box(node: Node, key: str) -> Box:
    """Build the box of a node that calls the module of another node, whose boxes show the parameters."""
    role = "head" if node.output.type == "logits" else "block"
    notes = (Note("kind", node.config.kind_name()), Note("same", f"weights of {_spaced_name(node.module)}"))
    return Box(f"{key}/output", role, _spaced_name(node.name), notes, tied="tie" in node.wires)


def _node_chain(node: Node, key: str, counts: ParameterCounts) -> Chain:
    """Build the boxes of a node that is not a stack.

    An embedding is recognized by its table, any other node by its modules.
    """
    table = node.config.table()
    items = _module_boxes(node, key, counts) if table is None else _embedding_items(node, table, key, counts)
    return Chain(key, node.name, tuple(items), counts.take(node.name))


def _embedding_items(node: Node, table: Signal, key: str, counts: ParameterCounts) -> Iterator[Box | Mark | Added]:
    yield Box(
        key=f"{key}/tokens",
        role="embedding",
        title=_spaced_name(node.name),
        notes=(Note("table", f"{table.rows:,} × {table.width:,}"),),
        parameters=counts.take(f"{node.name}.tokens"),
        tied="tie" in node.wires,
        tip=tip_of(node.config),
    )
    for stage in node.config.after_table():
        if isinstance(stage, Scale):
            yield Mark(f"{key}/scale", f"× √{stage.root_of:,}" if stage.root_of else f"× {number_text(stage.number)}")
        elif not isinstance(stage, Dropout):
            path = f"{node.name}.{stage.name}"
            yield _stage_box(stage, f"{key}/{stage.name.replace('.', '/')}", counts.label(path), counts.take(path))


def _stage_box(stage: Call | Lookup | Projection, key: str, label: str, parameters: int) -> Box | Added:
    if isinstance(stage, Projection):
        widths = Note("widths", f"{stage.d_in:,} → {stage.d_out:,}")
        return Box(key, "step", "projection", (widths,), parameters=parameters)
    if isinstance(stage, Lookup):
        notes = (Note("table", f"{stage.rows:,} rows"),)
        return Added(Box(key, "embedding", _spaced_name(stage.name.rpartition(".")[2]), notes, parameters=parameters))
    if isinstance(stage.config, PositionConfig):
        return Added(component_box(stage.config, key, f"{stage.config.kind_name()} positions", parameters))
    return norm_box(stage.config, key, label, parameters)


def component_box(config: Component, key: str, title: str, parameters: int) -> Box:
    """Build the box of a component from its config."""
    notes, chips = tuple(notes_of(config)), tuple(chips_of(config))
    return Box(key, config.slot, title, notes, chips, parameters=parameters, tip=tip_of(config))


def _module_boxes(node: Node, key: str, counts: ParameterCounts) -> Iterator[Box]:
    """Yield a box for each module with weights directly inside the node, in order. The last one is the main module."""
    config, inner = node.config, _node_component(node)
    gives_logits = node.output.type == "logits"
    role = "head" if gives_logits else "block"
    children = counts.children(node.name)
    names = [name for name in children if name != "output"]
    alone = not gives_logits and len(names) == 1 and f"{node.name}.{names[0]}" not in counts.components
    if alone or inner is not config:
        names = []  # the node is that one module
    for name in names:
        yield _inner_box(node, name, f"{key}/{name}", role, counts)
    notes = [] if node.name == inner.kind_name() else [Note("kind", inner.kind_name())]
    parts = [
        Box(f"{key}/output/{name}", "part", _spaced_name(name), parameters=counts.take(f"{node.name}.{name}"))
        for name in (children if inner.drawn_apart else ())
    ]
    width = node.output.width or 1  # a model with a single logit may return no axis for it
    notes += [Note("width", f"{width:,} {'logits' if gives_logits else 'wide'}")]
    yield Box(
        key=f"{key}/output",
        role=role if inner is config else inner.slot,
        title=_spaced_name(node.name),
        notes=(*notes, *notes_of(inner)),
        chips=() if names else tuple(chips_of(inner)),
        parts=tuple(parts),
        parameters=sum(part.parameters for part in parts) + counts.take(node.name),
        tied="tie" in node.wires,
        tip=tip_of(config),
    )


def _inner_box(node: Node, name: str, key: str, role: str, counts: ParameterCounts) -> Box:
    path = f"{node.name}.{name}"
    component = counts.components.get(path)
    if component is not None and component.slot == "norm":
        return norm_box(component, key, counts.label(path), counts.take(path))
    if component is not None:
        return component_box(component, key, _spaced_name(name), counts.take(path))
    chips = tuple(_activation_chips(node, name, counts))
    return Box(key, role, _spaced_name(name), chips=chips, parameters=counts.take(path))


def _node_component(node: Node) -> Component:
    """Return the component that a node consists of: its block, or the field `norm` of a block `norm` and the like."""
    inner = dict(node.config).get(node.config.kind_name())
    return inner if isinstance(inner, Component) and inner.slot == node.config.kind_name() else node.config


def _activation_chips(node: Node, name: str, counts: ParameterCounts) -> Iterator[Chip]:
    component = counts.components.get(f"{node.name}.activation")
    if component is not None and name == "dense":
        yield Chip("activation", "activation", component.kind_name())


def _spaced_name(name: str) -> str:
    return name.replace("_", " ")

"""From spec to graph: nodes in execution order, with connected and checked wires."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from dataclasses import field as field_of
from pathlib import Path
from typing import Annotated, Any, Self, TypeAlias, TypeVar, cast

from tfkit.arguments import AnyPath, Sets, checked
from tfkit.component import OWN_MASK, BlockConfig, Component, Config, Layers, Signal, WireMarker, marker, parts
from tfkit.errors import (
    MAX_ERRORS,
    Diagnostic,
    Invalid,
    SpecError,
    SpecWarning,
    closest_name,
    listing,
    quoted,
    similar_name_help,
)
from tfkit.graph.node_names import SPELLING, is_identifier, name_conflict
from tfkit.plugin.hooks import Hooks
from tfkit.plugin.manager import AnyPlugins, Plugins, load_plugins
from tfkit.spec.extending import weights_beside
from tfkit.spec.load import Spec, parse_spec, read_spec, take_spec
from tfkit.spec.merge import as_changes
from tfkit.spec.messages import crash_error, diagnostic_of
from tfkit.spec.model_spec import InputConfig, ModelSpec

C = TypeVar("C", bound=Config)

AnySource: TypeAlias = Annotated[AnyPath | Mapping[Any, Any], "a path or a mapping"]
"""A spec as users pass it."""
T = TypeVar("T")
Wires: TypeAlias = Mapping[str, Mapping[str, str | list[str]]]
"""The sources of each node by field: the name of a node or input, or a list of names."""


@dataclass(frozen=True)
class Node:
    """A block and its wires. `wires` holds the source of each connected field, or a list if the field is a list."""

    name: str
    config: Any
    """The `BlockConfig`. Its fields depend on the block, so type checkers accept any attribute."""
    wires: Mapping[str, str | list[str]]
    signals: Mapping[str, Any]
    output: Signal
    stack: Layers | None = None
    """The layers of a stack; None for every other block."""

    @property
    def module(self) -> str:
        """The path of its module: its name, or the name of the node that `same` names."""
        return str(self.wires.get("same", self.name))

    @property
    def makes_mask(self) -> bool:
        """True if the block returns (value, mask) instead of a value."""
        return self.output.mask == f"{self.name}_mask"


@dataclass(frozen=True, repr=False)
class Graph:
    """A spec that was read and checked: the nodes of a model, connected. The input of `build`.

        graph = tfkit.load("gpt2")
        graph.node("decoder").config.n_layers             # the values of a node
        dict(graph.configs(tfkit.AttentionConfig))        # the configs of a slot, by their paths in the spec

    It is immutable. A built model has its graph in `model.meta["graph"]`.
    """

    spec: Spec
    inputs: Mapping[str, Signal]
    nodes: tuple[Node, ...]
    outputs: tuple[str, ...]
    weights: Path | None = None
    """The folder from which the spec was loaded, if it contains weights, which `build` then loads."""
    hooks: Hooks | None = field_of(default=None, compare=False)
    """The hooks of the plugins with which a user loaded the spec; None for a graph that a tool derived."""

    @property
    def built_nodes(self) -> tuple[Node, ...]:
        """The nodes with a module; every other node calls the module of one of them by `same`."""
        return tuple(node for node in self.nodes if node.module == node.name)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.spec.model.name

    @checked
    def node(self, name: str) -> Node:
        """Return the node with a name; raise ValueError if there is none."""
        node = next((node for node in self.nodes if node.name == name), None)
        if node is None:
            raise ValueError(f"`{self.name}` has no node {quoted(name)}: {listing(node.name for node in self.nodes)}")
        return node

    def configs(self, cls: Callable[..., C]) -> Iterator[tuple[str, C]]:
        """Yield the configs of a class with their paths in the spec, including the configs of layer variants."""
        for path, part in parts((), self.spec.model):
            if isinstance(part, cast(type[C], cls)):  # mypy rejects an abstract class as an argument of type[C]
                yield ".".join(path), part

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "hooks": None}  # a pickle contains no code of plugins

    def __deepcopy__(self, memo: object) -> Self:
        """Return the graph itself. It is immutable, so copies of a model share it."""
        return self

    def __repr__(self) -> str:
        return f"<Graph {self.name}: {listing(node.name for node in self.nodes)}>"

    def _repr_svg_(self) -> str | None:
        """Return the picture that a notebook shows; None if the model cannot be drawn."""
        import tfkit

        try:
            return tfkit.draw(self)._repr_svg_()
        except Exception:
            return None


@checked
def load(spec: AnySource, *, sets: Sets = (), plugins: AnyPlugins | None = None) -> Graph:
    """Read a spec and check it, before any tensor exists.

        graph = tfkit.load("gpt2", sets=["d_model=384", "decoder.n_layers=4"])
        graph = tfkit.load("my_model.yaml", plugins=tfkit.load_plugins(plugin_dirs=["plugins"]))

    Args:
        spec: the name of a spec that comes with tfkit or a plugin, the path of a file, a mapping with the keys and
            values of the YAML, or the folder of a model. The graph of a folder refers to the weights in it: `build`,
            `compare` and `profile` use them. The path of the `spec.yaml` inside gives a graph without weights. A
            mapping finds the specs that it extends from the current folder; text in it is an unquoted word of YAML.
        sets: changes: `path=value` as `--set` takes it, a list of these, or a mapping of paths to values.
        plugins: the result of `load_plugins`; by default, all installed plugins.

    Raises:
        SpecError: with every error in the spec.
    """
    plugins, changes = plugins or load_plugins(), as_changes(sets)
    if isinstance(spec, Mapping):
        return announce_graph(expand(_issue_warnings(take_spec(spec, plugins, sets=changes))), plugins)
    graph = expand(_issue_warnings(read_spec(spec, plugins, sets=changes)))
    folder = weights_beside(spec, plugins.specs)
    return announce_graph(graph if folder is None else replace(graph, weights=folder.absolute()), plugins)


AnySpec: TypeAlias = Annotated[
    Graph | AnySource,
    "a spec: its name, its path, a mapping, or what `tfkit.load` returned, `model.meta['graph']` of a built model",
]
"""A model as users pass it."""


def as_graph(spec: AnySpec) -> Graph:
    """Return a graph unchanged, and load any other spec; raise SpecError as `load` does."""
    return spec if isinstance(spec, Graph) else load(spec)


@checked
def loads(text: str, *, sets: Sets = (), plugins: AnyPlugins | None = None) -> Graph:
    r"""Read a spec from YAML text and check it, before any tensor exists.

        graph = tfkit.loads("extends: gpt2\nd_model: 384")

    Args:
        text: the YAML; specs that it extends are found from the current folder.
        sets: as `load` takes them.
        plugins: as `load` takes them.

    Raises:
        SpecError: with every error in the spec.
    """
    plugins = plugins or load_plugins()
    return announce_graph(expand(_issue_warnings(parse_spec(text, plugins, sets=as_changes(sets)))), plugins)


def announce_graph(graph: Graph, plugins: Plugins) -> Graph:
    """Call the hook `tfkit_spec_loaded`, and return the graph with the hooks of its plugins.

    Raise SpecError if a plugin rejects the spec or fails.
    """
    graph = replace(graph, hooks=plugins.hooks)
    try:
        plugins.hooks.act("tfkit_spec_loaded", graph=graph)
    except SpecError as error:
        raise SpecError(
            *(located_diagnostic(diagnostic, graph) for diagnostic in error.diagnostics)
        ) from error.__cause__
    return graph


def located_diagnostic(diagnostic: Diagnostic, graph: Graph) -> Diagnostic:
    """Return the diagnostic of a plugin with the location of its path in the spec."""
    path = tuple(diagnostic.path.split(".")) if diagnostic.path else ()
    return replace(diagnostic, span=diagnostic.span or graph.spec.provenance.span(path)) if path else diagnostic


def _issue_warnings(spec: Spec) -> Spec:
    """Issue the warnings of a spec, and return the spec."""
    for note in spec.notes:
        warnings.warn(note.render("warning"), SpecWarning, stacklevel=4)
    return spec


def component_path(graph: Graph, node: str, component: Component) -> tuple[str, ...]:
    """Return the path of a component of a node, or the path of the node if it does not contain the component."""
    start = ("graph", node)
    paths = (path for path, part in parts(start, graph.node(node).config) if part is component)
    return next(paths, start)


def expand(spec: Spec) -> Graph:
    """Connect and check the nodes of a resolved spec; raise SpecError."""
    shared = {name: _shared_config(spec.model, config) for name, config in spec.model.graph.items() if config.same}
    if shared:
        spec = replace(spec, model=spec.model.model_copy(update={"graph": {**spec.model.graph, **shared}}))
    return _Expansion(spec).graph()


def _shared_config(model: ModelSpec, config: BlockConfig) -> BlockConfig:
    """Return the config of the node that `same` names, with the wires of `config`: a tool may have changed the node."""
    wires = {
        name: getattr(config, name) for name, info in type(config).model_fields.items() if marker(info, WireMarker)
    }
    return model.graph[str(config.same)].model_copy(update=wires)


class _Expansion:
    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.model: ModelSpec = spec.model
        self.errors: list[Diagnostic] = []
        self.tables: dict[str, Signal] = {}
        self.inputs = {name: _input_signal(name, config) for name, config in self.model.inputs.items()}

    def graph(self) -> Graph:
        self._check_names()
        self._stop_on_errors()
        wires = self._wires()
        self.tables = self._tables()
        self._stop_on_errors()
        order = self._order(wires)
        nodes = self._check_signals(order, wires)
        outputs = self._outputs()
        self._stop_on_errors()
        self._check_effect(wires, outputs)
        self._stop_on_errors()
        return Graph(self.spec, self.inputs, tuple(nodes), outputs)

    def _error(self, path: tuple[str, ...], message: str, *notes: str, help: str | None = None) -> None:
        span = self.spec.provenance.span(path)
        self.errors.append(Diagnostic(message, span, ".".join(path), notes, help))
        if len(self.errors) == MAX_ERRORS:
            self._stop_on_errors()

    def _stop_on_errors(self) -> None:
        if self.errors:
            raise SpecError(*self.errors)

    def _check_names(self) -> None:
        for part, names in (("inputs", self.model.inputs), ("graph", self.model.graph)):
            noun = "a node" if part == "graph" else "an input"
            for name in names:
                if not is_identifier(name):
                    self._error((part, name), f"{quoted(name)} cannot be the name of {noun}", help=SPELLING)
                elif (reason := name_conflict(name, of_input=part == "inputs")) is not None:
                    message = f"`{name}` cannot be the name of {noun}: {reason}"
                    self._error((part, name), message, help="choose a different name")
                elif part == "graph" and name in self.model.inputs:
                    self._error(
                        (part, name),
                        f"`{name}` is the name of an input and of a node",
                        help="choose a different name for the input or the node",
                    )

    def _wires(self) -> dict[str, dict[str, str | list[str]]]:
        """Return the sources of all wires by node. Without `input`, a node takes the output of the node above it."""
        wires: dict[str, dict[str, str | list[str]]] = {}
        above: str | None = None
        for name, config in self.model.graph.items():
            wires[name] = {}
            for field, info in type(config).model_fields.items():
                wire = marker(info, WireMarker)
                if wire is None:
                    continue
                source = getattr(config, field)
                if source is None and field == "input":
                    source = above or self._first_input(name)
                if source is None:
                    continue
                wires[name][field] = source if isinstance(source, str) else list(source)
                for index, item in enumerate([source] if isinstance(source, str) else source):
                    part = () if isinstance(source, str) else (item,) if isinstance(source, dict) else (str(index),)
                    self._check_source(("graph", name, field, *part), name, item)
            above = name
        return wires

    def _first_input(self, node: str) -> str | None:
        names = list(self.model.inputs)
        if len(names) == 1:
            return names[0]
        message = f"`{node}` has no node above it, and the model has several inputs"
        self._error(("graph", node), message, f"inputs: {listing(names)}", help="name the source: `input: NAME`")
        return None

    def _check_source(self, path: tuple[str, ...], node: str, source: str) -> None:
        nodes, inputs = list(self.model.graph), list(self.model.inputs)
        if source == node:
            self._error(path, f"`{node}` cannot be its own input", help="name a different node or an input")
        elif source not in nodes and source not in inputs:
            candidates = [name for name in (*nodes, *inputs) if name != node]
            help = similar_name_help(
                "a node" if closest_name(source, candidates) in nodes else "an input", source, candidates
            )
            notes = f"nodes: {listing(nodes)}", f"inputs: {listing(inputs)}"
            self._error(path, f"unknown node {quoted(source)}", *notes, help=help)

    def _order(self, wires: Wires) -> list[str]:
        """Sort the nodes so that each follows its sources; raise SpecError for a cycle."""
        try:
            return in_order(wires)
        except CycleError as cycle:
            name, source = cycle.names[:2]
            field = next(field for field, read in wires[name].items() if source in as_list(read))
            read, configured = wires[name][field], getattr(self.model.graph[name], field)
            part = (
                [] if isinstance(read, str) else [source if isinstance(configured, dict) else str(read.index(source))]
            )
            names = [name, *reversed(cycle.names)]
            names = [*names[:12], "..."] if len(names) > 12 else names
            self._error(("graph", name, field, *part), f"the graph has a cycle: {' -> '.join(names)}")
            self._stop_on_errors()
            raise

    def _check_signals(self, order: list[str], wires: Wires) -> list[Node]:
        """Let each block check its signals, unless the check of one of its sources failed."""
        outputs: dict[str, Signal] = dict(self.inputs)
        nodes: list[Node] = []
        for name in order:
            config = self.model.graph[name]
            signals = self._signals(name, config, wires[name], outputs)
            if signals is None:
                continue
            if config.same and not self._is_same_call(name, config, signals, nodes):
                continue
            path: tuple[str, ...] = ("graph", name)
            try:
                output = replace(config.output(signals), per_image=_has_row_per_image(config, signals))
            except Invalid as invalid:
                error = diagnostic_of(invalid, path, self.spec.provenance)
                if invalid.field == "input" and getattr(config, "input", None) is None:
                    note = f"`{name}` takes its input from `{wires[name]['input']}`, the node above it"
                    error = replace(error, notes=(*error.notes, note))
                self.errors.append(error)
                continue
            except KeyboardInterrupt:
                raise
            except BaseException as fault:  # a plugin's block
                self.errors.append(crash_error(type(config), "`output`", fault, path, self.spec.provenance))
                continue
            if output.mask == OWN_MASK:
                output = replace(output, mask=f"{name}_mask", gaps=True)
            outputs[name] = output
            nodes.append(Node(name, config, wires[name], signals, output, self._call(name, "stack", config.stack)))
        return nodes

    def _signals(
        self,
        name: str,
        config: BlockConfig,
        wires: Mapping[str, str | list[str]],
        outputs: Mapping[str, Signal],
    ) -> dict[str, Any] | None:
        signals: dict[str, Any] = {}
        for field, source in wires.items():
            wire = marker(type(config).model_fields[field], WireMarker)
            if wire is not None and wire.value == "module":
                continue
            if wire is not None and wire.value == "table":
                values = [self._table(name, field, item) for item in as_list(source)]
            else:
                values = [outputs.get(item) for item in as_list(source)]
            if None in values:
                return None
            signals[field] = values[0] if isinstance(source, str) else values
        return signals

    def _is_same_call(self, name: str, config: BlockConfig, signals: Mapping[str, Any], nodes: list[Node]) -> bool:
        """Record an error unless a node has the types of inputs for which the module that it calls is built."""
        owner = next((node for node in nodes if node.name == config.same), None)
        if owner is None:
            return False
        for field in {**owner.signals, **signals}:
            first, second = ([*map(_type_of, as_list(part.get(field, [])))] for part in (owner.signals, signals))
            sizes = [getattr(part, field) for part in (owner.config, config)]
            if first != second or (isinstance(sizes[0], dict) and [*sizes[0].values()] != [*sizes[1].values()]):
                texts = [" and ".join(signal.in_words() for signal in part) or "nothing" for part in (first, second)]
                message = f"`{field}` must be as in `{owner.name}`, {texts[0]}; got {texts[1]}"
                help = f"write `like: {owner.name}` for separate weights"
                self._error(("graph", name, field), message, help=help)
                return False
        return True

    def _table(self, name: str, field: str, source: str) -> Signal | None:
        table = self.tables.get(source)
        if table is None:
            owners = [owner for owner in self.tables if owner != name]
            self._error(
                ("graph", name, field),
                f"`{source}` has no token table to tie to",
                f"nodes with a table: {listing(owners)}" if owners else "no other node has a table",
            )
        return table

    def _tables(self) -> dict[str, Signal]:
        """Return the token table of each node that has one."""
        tables = {name: self._call(name, "table", config.table) for name, config in self.model.graph.items()}
        return {name: table for name, table in tables.items() if table is not None}

    def _call(self, node: str, method: str, function: Callable[[], T]) -> T | None:
        """Call a method of a block. If a plugin's method raises an exception, record an error and return None."""
        try:
            return function()
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            config, path = type(self.model.graph[node]), ("graph", node)
            self.errors.append(crash_error(config, f"`{method}`", error, path, self.spec.provenance))
            return None

    def _outputs(self) -> tuple[str, ...]:
        if self.model.outputs is None:
            return (list(self.model.graph)[-1],)
        if not self.model.outputs:
            self._error(("outputs",), "a model must have an output: name a node, or remove `outputs`")
        for index, name in enumerate(self.model.outputs):
            if name not in self.model.graph:
                nodes, help = f"nodes: {listing(self.model.graph)}", similar_name_help("a node", name, self.model.graph)
                self._error(("outputs", str(index)), f"unknown node {quoted(name)}", nodes, help=help)
            elif name in self.model.outputs[:index]:
                self._error(("outputs", str(index)), f"output `{name}` is in the list twice")
        return self.model.outputs

    def _check_effect(self, wires: Wires, outputs: tuple[str, ...]) -> None:
        """Report nodes and inputs that no node uses and that are not outputs."""
        read = {source for fields in wires.values() for source in wire_sources({**fields, "same": []})}
        for name in self.model.graph:
            if name not in read and name not in outputs:
                message = f"`{name}` has no effect: no node uses its output"
                help = "use it as the input of a node, or add it to `outputs: [...]`"
                self._error(("graph", name), message, help=help)
        for name in self.model.inputs:
            if name not in read:
                help = f"use it in a node, as in `input: {name}`, or remove it"
                self._error(("inputs", name), f"input `{name}` has no effect: no node uses it", help=help)


def _has_row_per_image(config: BlockConfig, signals: Mapping[str, Any]) -> bool:
    """Return True if the output of a block has a row for each image; raise `Invalid` if only some inputs have."""
    values = {field: [s for s in as_list(part) if s.type != "table"] for field, part in signals.items()}
    per_image = {field: [s.per_image or s.type == "images" for s in part] for field, part in values.items()}
    if config.joins_images or not any(map(any, per_image.values())):
        return False
    for field in (field for field, rows in per_image.items() if not all(rows)):
        message = f"`{field}` must have a row for each image, as the other inputs of this block"
        raise Invalid(field, message, help="put `join_images` of tfkit-media after the blocks that read images")
    return True


def _type_of(signal: Signal) -> Signal:
    """Return a signal without the name of its mask."""
    return replace(signal, mask=None if signal.mask is None else "")


def _input_signal(name: str, config: InputConfig) -> Signal:
    if not config.is_sequence:
        return Signal(cast(Any, config.type), config.width, rows=config.height, channels=config.channels)
    kind = "sequence" if config.type == "features" else config.type
    masked = config.type != "positions" and (config.length is None or config.padded)
    mask = f"{name}_mask" if masked else None
    return Signal(cast(Any, kind), config.width, config.length, mask=mask, optional=config.optional)


# ---- the order in which nodes run ----


class CycleError(Exception):
    """A cycle of nodes: each of `names` takes the output of the next, and the last takes the output of the first."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names


def as_list(source: Any) -> list[Any]:
    """Return the sources or the signals of a field as a list."""
    return source if isinstance(source, list) else [source]


def wire_sources(fields: Mapping[str, str | list[str]]) -> Iterator[str]:
    """Yield the sources of a node."""
    return (name for source in fields.values() for name in as_list(source))


def in_order(wires: Wires) -> list[str]:
    """Return the nodes in the order of the spec, except that each follows its sources; raise CycleError."""
    done: dict[str, None] = {}
    for start in wires:
        trail = {} if start in done else {start: wire_sources(wires[start])}
        while trail:
            name = next(reversed(trail))
            source = next((name for name in trail[name] if name not in done and name in wires), None)
            if source is None:
                done[name] = None
                del trail[name]
            elif source in trail:
                raise CycleError(_rotated_cycle(list(trail), source, list(wires)))
            else:
                trail[source] = wire_sources(wires[source])
    return list(done)


def _rotated_cycle(trail: list[str], source: str, order: list[str]) -> list[str]:
    """Return the cycle from `source` to the end of `trail`, rotated to begin with its first node in `order`."""
    names = trail[trail.index(source) :]
    start = min(range(len(names)), key=lambda index: order.index(names[index]))
    return names[start:] + names[:start]

"""A model as programs of `torch.export` with dynamic shapes: the full sequence, and the steps of cached decoding.

    model      all inputs, all masks                          -> the model's outputs
    read       inputs that are read once, with their masks     -> the values that the steps take: an encoder's output
    prefill    the first step, its masks, `cache`             -> the model's outputs for the step
    decode     one token, its masks, `cache`, `past` [b]      -> the model's outputs for the token

`past` counts the tokens of each sequence that were read before, without padding. A program has a single signature, so
masks are required: without padding, they are True everywhere. The batch size, the lengths and the size of the caches
are dynamic. The caches are updated in place, or returned as a second result if a format does not support updates.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import Dim, ExportedProgram

from tfkit.building.builder import graph_of, inputs_of
from tfkit.component import Cached, MixerConfig, State
from tfkit.decoding.cached import block_numbers
from tfkit.decoding.modules import empty_caches, initial_value_names, reading_module, stepping_module
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.decode_split import DecodeSplit, split_if_decodable
from tfkit.graph.expand import Graph, as_list
from tfkit.graph.input_shapes import fixed_lengths, max_len
from tfkit.nn import Past, as_padding_mask
from tfkit.tools.common.model_inputs import export_inputs
from tfkit.tools.export.failing_component import exporter_error, failing_module_path, suppress_messages
from tfkit.tools.export.formats import CachedReader, Inputs, Opened

MODEL, READ, PREFILL, DECODE = "model", "read", "prefill", "decode"
UNLIMITED = 2**31
Cache = dict[str, list[list[Tensor]]]


class Caches:
    """The caches of a model whose sequences are read in steps.

    Attributes:
        parts: the nodes that run once, and the nodes that run at every step.
        first: the values that are read once and passed only at the first step.
        of_memory: the names of the caches of a memory, which are written only at the first step.
        limit: the model's `max_len`; None if it has none.
        min_length: the minimum number of tokens for which caches are created: more than any sliding window.
        full: node, layer and number of a cache that holds all tokens; None if all caches are windows.
    """

    def __init__(self, graph: Graph, parts: DecodeSplit) -> None:
        self.parts = parts
        layers_by_node = {name: state.caches for name, (_, state) in parts.step_nodes.items()}
        self.of_memory = [f"{name}.memory" for name, (_, state) in parts.step_nodes.items() if state.memory_caches]
        self.first = tuple(name for name in parts.static_sources if name not in parts.repeated_sources)
        self.limit = max_len(graph)
        locations = [
            ((name, layer, i), cache)
            for name, layers in layers_by_node.items()
            for layer, cached in enumerate(layers)
            for i, cache in enumerate(cached)
            if isinstance(cache, Cached)
        ]
        windows = [cache.window for _, cache in locations if cache.window]
        self.min_length = 1 + max([1, *(window for window in windows if window < (self.limit or UNLIMITED))])
        if self.limit is not None:
            self.min_length = min(self.min_length, self.limit)
        n = self.min_length
        self.full = next((location for location, cache in locations if cache.tokens(n) == n), None)

    def make(self, batch: int, length: int, memory: int, like: Tensor) -> Cache:
        """Create caches of zeros for `length` tokens and a memory; one additional slot receives padding."""
        return empty_caches(self.parts, batch, max(length, self.min_length), lambda _: memory, like)

    def room(self, cache: Cache) -> int:
        """Return the capacity of the caches in tokens."""
        return _cache_capacity(cache, self.full, self.limit)

    def free(self, cache: Cache) -> dict[str, list[list[dict[int, Any]]]]:
        """Return the dynamic sizes of each cache; the slots of a sliding window and the rows of a state are fixed."""
        room = self.room(cache)

        def sizes(entry: Cached | State, of_memory: bool) -> dict[int, Any]:
            free = isinstance(entry, Cached) and (of_memory or entry.tokens(room) == room)
            return {0: Dim.DYNAMIC} | ({2: Dim.DYNAMIC} if free else {})

        free = {}
        for name, (_, state) in self.parts.step_nodes.items():
            free[name] = [[sizes(entry, False) for entry in layer] for layer in state.caches]
            free[f"{name}.memory"] = [[sizes(entry, True) for entry in layer] for layer in state.memory_caches]
        return {name: free[name] for name in cache}


def caches_of(graph: Graph) -> Caches | None:
    """Return the caches of a model; None if it needs full sequences."""
    parts = split_if_decodable(graph)
    return None if parts is None else Caches(graph, parts)


def model_programs(
    model: fx.GraphModule, inputs: Mapping[str, Tensor], *, in_place: bool = True
) -> dict[str, ExportedProgram]:
    """Return the programs of a model in eval mode, by name; only `model` if it needs full sequences.

    `inputs` are examples of all inputs and masks, with at least 2 entries in each dynamic size. With `in_place`, caches
    are updated in place; otherwise they are a second result. Raise SpecError with the component at fault if
    torch.export rejects the model.
    """
    if reasons := _loop_errors(graph_of(model)):
        raise SpecError(*reasons)
    try:
        return _export_programs(model, inputs, in_place=in_place)
    except Exception as error:
        path = failing_module_path(model, lambda: _export_programs(model, inputs, in_place=in_place))
        raise exporter_error(model, path, error, "torch.export") from error


def export_errors(model: fx.GraphModule) -> list[Diagnostic]:
    """Return the reasons why a model has no programs. The model may be on the meta device."""
    if reasons := [*_loop_errors(graph_of(model)), *_position_errors(graph_of(model))]:
        return reasons
    inputs = export_inputs(model)
    try:
        export_module(model, inputs, fixed=fixed_lengths(graph_of(model)))
    except Exception as error:
        path = failing_module_path(model, lambda: export_module(model, inputs))
        return list(exporter_error(model, path, error, "torch.export").diagnostics)
    return []


def _position_errors(graph: Graph) -> list[Diagnostic]:
    """Return an error for each optional input of positions: a program cannot count what its caller leaves out."""
    names = {str(node.wires["positions"]) for node in graph.nodes if "positions" in node.wires}
    return [
        Diagnostic(
            f"input `{name}` cannot be optional in a program of torch.export, which does not count positions",
            None,
            f"inputs.{name}",
            help=f"make it required: --set inputs.{name}.optional=false",
        )
        for name in sorted(names)
        if name in graph.inputs and graph.inputs[name].optional
    ]


def looping_kinds(graph: Graph) -> dict[str, str]:
    """Return the kinds of the mixers whose loops fix the length of a program, with the path of a config of each."""
    mixers = graph.configs(MixerConfig)
    return {mixer.kind_name(): path for path, mixer in mixers if not mixer.free_length}


def _loop_errors(graph: Graph) -> list[Diagnostic]:
    """Return an error for each looping kind. The error of torch would name a constraint instead of a component."""
    return [
        Diagnostic(
            f"mixer `{kind}` cannot be exported by torch.export: its loop fixes the length of the program",
            None,
            path,
            help="export TorchScript, which keeps loops: --format torchscript",
        )
        for kind, path in looping_kinds(graph).items()
    ]


def _export_programs(
    model: fx.GraphModule, inputs: Mapping[str, Tensor], *, in_place: bool
) -> dict[str, ExportedProgram]:
    graph = graph_of(model)
    exported_programs = {MODEL: export_module(model, dict(inputs), fixed=fixed_lengths(graph))}
    if (caches := caches_of(graph)) is None:
        return exported_programs
    values, parts = dict(inputs), caches.parts
    if parts.initial_nodes:
        reading = reading_module(model, graph, parts)
        arguments = {name: inputs[name] for name in inputs_of(reading)}
        exported_programs[READ] = export_module(reading, arguments, fixed=fixed_lengths(graph))
        with torch.no_grad():
            values |= zip(initial_value_names(parts), reading(**arguments), strict=True)
    for name in (PREFILL, DECODE):
        exported_programs[name] = _step_program(model, caches, values, decode=name == DECODE, in_place=in_place)
    return exported_programs


def _step_program(
    model: fx.GraphModule, caches: Caches, values: Mapping[str, Tensor], *, decode: bool, in_place: bool
) -> ExportedProgram:
    """Return the program of the first step of a sequence, or of each further token."""
    step, parts = stepping_module(model, graph_of(model), caches.parts), caches.parts
    arguments: dict[str, Any] = {name: values[name] for name in inputs_of(step) if name in values}
    first = caches.first
    memory = next((values[name].size(1) for name in first), 1)
    if decode:
        stepwise = [name for name in arguments if name.removesuffix("_mask") in parts.step_inputs]
        arguments |= {name: arguments[name][:, :1].contiguous() for name in stepwise}
        arguments = {name: value for name, value in arguments.items() if name not in first}
    tokens = values[parts.step_inputs[0]]
    like = next(model.parameters(), torch.empty(0))
    arguments["cache"] = caches.make(tokens.size(0), tokens.size(1), memory, like)
    arguments["past"] = torch.ones(tokens.size(0), dtype=torch.int64, device=tokens.device)
    _rewrite_step(step, caches, gone=first if decode else (), decode=decode, in_place=in_place)
    return export_module(step, arguments, caches)


def _rewrite_step(step: fx.GraphModule, caches: Caches, *, gone: Iterable[str], decode: bool, in_place: bool) -> None:
    """Change a stepping module so that all arguments are tensors: the caches determine their capacity in tokens."""
    graph = step.graph
    arguments = {str(node.target): node for node in graph.find_nodes(op="placeholder")}
    past, cache = arguments["past"], arguments["cache"]
    with graph.inserting_after(cache):
        lengths = graph.placeholder("past", Tensor) if decode else None
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        if not in_place:
            memory = caches.of_memory if decode else []
            cache.replace_all_uses_with(copies := graph.call_function(_copied_caches, (cache, memory)))
            copies.args = (cache, memory)
        past.replace_all_uses_with(graph.call_function(_preceding_tokens, (cache, lengths, caches.full, caches.limit)))
    if not in_place:
        (output,) = graph.find_nodes(op="output")
        with graph.inserting_before(output):
            output.args = ((output.args[0], graph.call_function(_without_caches, (copies, memory))),)
    fixed = {arguments["keep"]: 0} | {arguments[name]: None for name in gone}
    for node in graph.nodes:
        node.args, node.kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda node_argument: fixed.get(node_argument, node_argument)
        )
    for node in (past, *fixed):
        graph.erase_node(node)
    step.recompile()


def _cache_capacity(cache: Cache, full: tuple[str, int, int] | None, limit: int | None) -> int:
    """Return the capacity of the caches in tokens, from the size of a cache that holds all tokens."""
    if full is None:
        return limit or UNLIMITED
    name, layer, i = full
    return cache[name][layer][i].size(2) - 1


def _preceding_tokens(
    cache: Cache, lengths: Tensor | None, full: tuple[str, int, int] | None, limit: int | None
) -> Past:
    """Return the preceding tokens: none, or all columns except one; all shapes are then constant."""
    room = _cache_capacity(cache, full, limit)
    return Past(0 if lengths is None else room - 1, room, lengths)


def _copied_caches(cache: Cache, read: Collection[str]) -> Cache:
    """Copy the caches that the program updates."""
    return {
        name: layers if name in read else [[tensor.clone() for tensor in tensors] for tensors in layers]
        for name, layers in cache.items()
    }


def _without_caches(cache: Cache, names: Collection[str]) -> Cache:
    return {name: layers for name, layers in cache.items() if name not in names}


def _is_vector(x: Tensor) -> bool:
    return x.dim() == 2 and x.is_floating_point()


def export_module(
    module: fx.GraphModule, arguments: dict[str, Any], caches: Caches | None = None, *, fixed: Collection[str] = ()
) -> ExportedProgram:
    """Export a module with its arguments; the batch and all lengths above 1 are dynamic.

    The lengths of the `fixed` inputs are static.
    """
    kwargs = {name: arguments[name] for name in inputs_of(module) if name in arguments}
    static = {*fixed, *(f"{name}_mask" for name in fixed)}
    shapes: dict[str, Any] = {
        name: {
            i: Dim.DYNAMIC for i in range(1 if name in static or _is_vector(x) else min(x.dim(), 2)) if x.size(i) > 1
        }
        for name, x in kwargs.items()
        if isinstance(x, Tensor)
    }
    if caches is not None:
        shapes["cache"] = caches.free(kwargs["cache"])
    shapes = {name: shapes[name] for name in kwargs}
    with suppress_messages(), torch.no_grad():
        program = torch.export.export(module, (), kwargs, dynamic_shapes=shapes, strict=False)
    for node in program.graph.nodes:
        node.meta.pop("stack_trace", None)  # it contains paths of the machine that exports
    return program


class Watched(fx.Interpreter):
    """Runs a program, and records the outputs of the modules whose operations it contains, by path.

    The output of a module is its last value that an operation outside uses; of several calls, the first call counts.
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__(module := program.module())
        self.outputs: dict[str, Tensor] = {}
        self._returned = returning_modules(
            {node: _module_calls(node) for node in module.graph.nodes}, lambda node: node.users
        )

    def run_node(self, n: fx.Node) -> Any:
        """Run one operation."""
        value = super().run_node(n)
        if isinstance(value, Tensor):
            self.outputs |= dict.fromkeys(self._returned[n], value)
        return value


def _module_calls(node: fx.Node) -> dict[str, str]:
    """Return the module calls that an operation belongs to, by unique names, with the modules' paths."""
    return {call: path for call, (path, _) in node.meta.get("nn_module_stack", {}).items()}


def returning_modules(
    calls: Mapping[Any, Mapping[str, str]], users: Callable[[Any], Iterable[Any]]
) -> dict[Any, list[str]]:
    """Map each operation to the modules that return its value: a user of the value is not part of the module call.

    The name of a second call of a module contains `@`.
    """
    return {
        node: [
            path
            for call, path in inside.items()
            if "@" not in call and any(call not in calls[user] for user in users(node))
        ]
        for node, inside in calls.items()
    }


# ---- incremental reading by the programs of a file: the same calls for all formats with programs ----


class IncrementalReader:
    """Reads up to `length` tokens of each sequence in steps: the first by one program, then token by token."""

    def __init__(self, graph: Graph, caches: Caches, programs: Programs, *, length: int, like: Tensor) -> None:
        self._graph = graph
        self._caches = caches
        self._programs = programs
        self._length = length
        self._like = like
        self._batch: int | None = None
        self._always: dict[str, Any] = {}
        self._first: dict[str, Tensor] = {}
        self._lengths: Tensor | None = None
        self._used = 0

    def start(self, batch: int, /, **inputs: Tensor) -> None:
        """Begin new sequences, and read the inputs that are read once."""
        parts, values = self._caches.parts, dict(inputs)
        if parts.initial_nodes:
            arguments = program_arguments(self._graph, inputs, self._programs.takes(READ))
            values |= arguments | dict(
                zip(initial_value_names(parts), self._programs.run(READ, arguments), strict=True)
            )
        self._first = {name: values[name] for name in self._caches.first}
        memory = next((value.size(1) for value in self._first.values()), 1)
        again = (*parts.step_inputs, *(f"{name}_mask" for name in parts.step_inputs))
        always = program_arguments(
            self._graph, values, [name for name in self._programs.takes(DECODE) if name not in again]
        )
        self._always = {**always, "cache": self._caches.make(batch, self._length, memory, self._like)}
        self._batch, self._lengths, self._used = batch, None, 0

    def __call__(self, tokens: Tensor, mask: Tensor | None = None, /, **inputs: Tensor) -> Any:
        """Return the outputs for the next tokens [b, t]; the mask is False at padding.

        Raise ValueError if the cache is full.
        """
        if self._batch is None:
            self.start(tokens.size(0))
        if self._used + tokens.size(1) > self._length:
            raise ValueError(f"{tokens.size(1)} more tokens do not fit: {self._used} of {self._length} have been read")
        main = self._caches.parts.step_inputs[0]
        real = as_padding_mask(mask, f"{main}_mask")
        mask = torch.ones_like(tokens, dtype=torch.bool) if real is None else real
        arguments = {main: tokens, f"{main}_mask": mask, **inputs}
        results = self._prefill(arguments) if self._lengths is None else self._decode(arguments, mask)
        read = mask.sum(dim=1)
        self._lengths = read if self._lengths is None else self._lengths + read
        self._used += tokens.size(1)
        return results[0] if len(results) == 1 else tuple(results)

    def _prefill(self, arguments: dict[str, Tensor]) -> list[Tensor]:
        taken = program_arguments(self._graph, arguments | self._always | self._first, self._programs.takes(PREFILL))
        return self._programs.run(PREFILL, taken)

    def _decode(self, arguments: dict[str, Tensor], mask: Tensor) -> list[Tensor]:
        """Read several tokens one after the other."""
        tokens = arguments[self._caches.parts.step_inputs[0]]
        for name in self._caches.parts.block_inputs:
            if bool(block_numbers(self._graph, name, tokens, arguments).any()):
                raise ValueError(f"`{name}` must have all blocks in the first call; got a block in a later call")
        columns = []
        for i in range(mask.size(1)):
            assert self._lengths is not None
            column_inputs = {name: value[:, i : i + 1].contiguous() for name, value in arguments.items()}
            column_inputs |= self._always | {"past": self._lengths + mask[:, :i].sum(dim=1)}
            columns.append(
                self._programs.run(DECODE, program_arguments(self._graph, column_inputs, self._programs.takes(DECODE)))
            )
        return [torch.cat(column, dim=1) for column in zip(*columns, strict=True)]


def program_arguments(graph: Graph, inputs: Inputs, names: Iterable[str]) -> dict[str, Tensor]:
    """Return all arguments of a program: missing masks hide nothing, missing optional tokens and blocks are 0."""
    arguments = dict(inputs)
    names = list(names)
    for name in names:
        if name in graph.inputs and name not in arguments:
            arguments[name] = torch.zeros_like(arguments[_described_input(graph, name)])
    for name in names:
        if name.endswith("_mask") and name not in arguments and name.removesuffix("_mask") in arguments:
            hidden = arguments[name.removesuffix("_mask")]
            arguments[name] = torch.ones(hidden.shape[:2], dtype=torch.bool, device=hidden.device)
    return {name: arguments[name] for name in names if name in arguments}


def _described_input(graph: Graph, name: str) -> str:
    """Return the input that an optional input describes."""
    source = next(node for node in graph.nodes if any(name in as_list(wire) for wire in node.wires.values())).name
    while source not in graph.inputs:
        source = str(graph.node(source).wires["input"])
    return source


class Programs(Opened):
    """The programs of a file, as in the table above; `graph` is the graph of the exported model."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    @abstractmethod
    def takes(self, name: str) -> Iterable[str]:
        """Return the argument names of a program."""

    @abstractmethod
    def run(self, name: str, arguments: dict[str, Any]) -> list[Tensor]:
        """Run a program and return its results. The tensors in `cache` are updated in place."""

    def forward(self, inputs: Inputs) -> list[Tensor]:
        return self.run(MODEL, program_arguments(self.graph, inputs, self.takes(MODEL)))

    def cached(self, length: int) -> CachedReader | None:
        caches = caches_of(self.graph)
        like = next(iter(self.weights().values()), torch.empty(0))
        return None if caches is None else IncrementalReader(self.graph, caches, self, length=length, like=like)

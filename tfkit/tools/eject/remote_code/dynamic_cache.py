"""Causal attention with the positions, masks and caches of transformers: a slot for each column of the input.

tfkit counts positions, caches tokens, and writes its masks, so windows are rings and padding takes no slot. A decoder
can use the caches of transformers instead, which store all columns, with the masks of its `masking_utils`. The
functions here replace their counterparts in tfkit. Their argument `mask` is the mask of the scores, `past` holds
positions, and `caches` is the cache of all layers.

If layers carry states, `mask` is the padding of the new tokens, and `past` also holds the mask of the scores. The state
with index i among the cached tensors of a layer is the recurrent state i of its layer in the cache.
"""

# Annotations are evaluated as in `tfkit.nn.context`.
import ast
import copy
import inspect
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tfkit.component import Cached, State
from tfkit.tools.eject.cleanup import statement_blocks, variable_names
from tfkit.tools.eject.source import Key
from tfkit.tools.eject.specialise import Function
from tfkit.tools.eject.text import steps_text
from tfkit.tools.eject.values import SOME_VALUE, Records

TYPES = {
    "tokens": "TokenPositions",
    "positions": "Tensor",
    "past_key_values": "Cache | None",
    "cache": "Cache | None",
    "options": "dict[str, Any]",
}
"""The types of arguments and of fields of records, in a folder."""


class Masks(NamedTuple):
    """The masks of the layers with full attention and of the layers with windows or chunks."""

    full: Tensor | None
    local: Tensor | None


class TokenPositions(NamedTuple):
    """Positions of new tokens [b or 1, t] and keys [b or 1, k], and the options and mask of the attention."""

    positions: Tensor
    keys: Tensor | None
    options: dict[str, object] | None
    score_mask: Tensor | None


class CachedKeys(NamedTuple):
    """Positions of the new tokens and of the keys, their number, and the options and mask of the attention."""

    queries: Tensor
    keys: Tensor | None
    n_keys: int
    options: dict[str, object] | None
    score_mask: Tensor | None


class LayerCache(NamedTuple):
    """The states of a layer by index, and the cache of all layers."""

    tensors: list[Tensor]
    layers: Any


class Context(NamedTuple):
    """The inputs of a sublayer besides x [b, q, d_model]."""

    mask: Tensor | None
    rotary: Tensor | None
    memory: Tensor | None
    cache: Any = None
    temperature: Tensor | None = None
    padding: Tensor | None = None
    order: Tensor | None = None
    documents: Tensor | None = None
    condition: Tensor | None = None
    relative: tuple[Tensor, Tensor] | None = None
    wires: dict[str, Tensor] | None = None
    features: Tensor | None = None
    key_positions: Tensor | None = None
    layer: int = 0
    options: dict[str, object] | None = None


def count_positions(x: Tensor, mask: Tensor | None, past: TokenPositions) -> Tensor:
    """Return the positions of the new tokens."""
    return past.positions


def embedded_positions(self: nn.Module, x: Tensor, mask: Tensor | None, past: TokenPositions) -> Tensor:
    """Return the positions of the new tokens."""
    return past.positions


def place(queries: Tensor, padding: Tensor | None, past: TokenPositions, n_slots: int | None) -> CachedKeys:
    """Return the positions of the new tokens and of the keys."""
    return CachedKeys(past.positions, past.keys, int(past.positions.max()) + 1, past.options, past.score_mask)


def shared_values(self: Any, x: Tensor, mask: Any, prefix: Tensor | None, cached: CachedKeys | None) -> Context:
    # The values that layers share; the mask is the mask of the scores, or `Masks`. Without attention, there are none.
    if cached is None:
        return Context(None, None, None)
    queries, keys, n_keys, options, score_mask = cached
    rotary: Tensor | None = None
    if self.rotary is not None:
        rotary = self.rotary(queries, n_keys).to(x.dtype)
    temperature: Tensor | None = None
    if self.temperature is not None:
        temperature = self.temperature(queries).to(x.dtype)
    if self.recurrent:
        mask = score_mask
    if self.chooses_mask:
        if self.ring:
            mask = mask.local
        else:
            mask = mask.full
    if self.position is not None:
        assert mask is not None
        bias = self.position(queries, keys).to(x.dtype)
        mask = torch.where(mask, bias, -math.inf) if mask.dtype == torch.bool else bias + mask
    relative: tuple[Tensor, Tensor] | None = None
    if self.relative is not None:
        relative = self.relative(queries, keys)
    return Context(mask, rotary, None, temperature=temperature, relative=relative, options=options)


# The three functions below do not call each other: each is written into folders, where a call would be inlined into the
# loop over the layers.


def cache_of_layer(context: Context, caches: Any, layer: int) -> Context:
    """Return the context of one layer: the shared context with the cache."""
    return Context(
        context.mask,
        context.rotary,
        context.memory,
        caches,
        context.temperature,
        context.padding,
        context.order,
        context.documents,
        context.condition,
        context.relative,
        context.wires,
        context.features,
        context.key_positions,
        layer,
        context.options,
    )


def states_of_layer(context: Context, caches: Any, layer: int) -> Context:
    """Return the context of one layer: the shared context with the states of the layer and the cache."""
    cache = None if caches is None else LayerCache(layer_states(caches, layer), caches)
    return Context(
        context.mask,
        context.rotary,
        context.memory,
        cache,
        context.temperature,
        context.padding,
        context.order,
        context.documents,
        context.condition,
        context.relative,
        context.wires,
        context.features,
        context.key_positions,
        layer,
        context.options,
    )


def states_of_next(context: Context, before: int) -> Context:
    """Return the context of a further sublayer of a layer, whose tensors follow `before` others."""
    cache = context.cache
    if cache is None:
        return context
    return Context(
        context.mask,
        context.rotary,
        context.memory,
        LayerCache(cache.tensors[before:], cache.layers),
        context.temperature,
        context.padding,
        context.order,
        context.documents,
        context.condition,
        context.relative,
        context.wires,
        context.features,
        context.key_positions,
        context.layer,
        context.options,
    )


def with_values(
    context: Context,
    cache: Any = None,
    padding: Tensor | None = None,
    order: Tensor | None = None,
    documents: Tensor | None = None,
    condition: Tensor | None = None,
    wires: dict[str, Tensor] | None = None,
    features: Tensor | None = None,
) -> Context:
    """Return the context with these values; None changes nothing."""
    return Context(
        context.mask,
        context.rotary,
        context.memory,
        context.cache,
        context.temperature,
        context.padding if padding is None else padding,
        context.order if order is None else order,
        context.documents if documents is None else documents,
        context.condition if condition is None else condition,
        context.relative,
        context.wires if wires is None else wires,
        context.features if features is None else features,
        context.key_positions,
        context.layer,
        context.options,
    )


def update_cache(new: Tensor, context: Context, index: int) -> Tensor:
    """Return a tensor of all tokens. The calls for keys and for values become one: see `join_updates`."""
    return new if context.cache is None else context.cache.update(new, context.layer, index)


def layer_states(cache: Any, layer: int) -> list[Tensor]:
    """Return the states of a layer by index. The function of a template replaces this one."""
    return list(cache.layers[layer].recurrent_states.values())


CONTEXT = "tfkit.components.context.AttentionContext"
CHUNK = "tfkit.components.mask_rule.Chunk"


def contexts_of(model: nn.Module) -> list[Any]:
    """Return the modules that compute the values that layers share."""
    return [module for module in model.modules() if _class_path(module) == CONTEXT]


def attention_contexts(model: nn.Module, caches: Sequence[Sequence[Cached | State]]) -> list[Any]:
    """Return the modules of `contexts_of` that belong to layers with a cache of tokens, by the caches of the layers."""
    stack: Any = next(module for module in model.modules() if hasattr(module, "context_of"))
    numbers = {
        number
        for number, layer in zip(stack.context_of, caches, strict=True)
        if any(isinstance(entry, Cached) for entry in layer)
    }
    contexts = list(stack.shared.children())
    return [contexts[number] for number in sorted(numbers)]


def is_chunk(rule: nn.Module | None) -> bool:
    """Return True for the rule by which each query attends to the keys of its chunk."""
    return rule is not None and _class_path(rule) == CHUNK


def _class_path(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


INSTEAD = {
    "tfkit.components.cached_keys.CachedKeys": CachedKeys,
    "tfkit.components.cached_keys.place": place,
    f"{CONTEXT}.forward": shared_values,
    "tfkit.components.embedding.Positions.forward": embedded_positions,
    "tfkit.nn.context.Context": Context,
    "tfkit.nn.context.count_positions": count_positions,
    "tfkit.nn.context.cache_of_layer": cache_of_layer,
    "tfkit.nn.context.with_values": with_values,
    "tfkit.nn.context.update_cache": update_cache,
}
"""Replacements for functions and records of tfkit, by the name of the original."""
WITH_STATES = {
    **INSTEAD,
    "tfkit.nn.context.Cache": LayerCache,
    "tfkit.nn.context.cache_of_layer": states_of_layer,
    "tfkit.nn.context.cache_of_next": states_of_next,
}
"""Replacements for a decoder whose layers carry states."""


def layer_types(caches: Iterable[Iterable[Cached | State]], local: str) -> list[str]:
    """Return the type of each layer in transformers: by its cached tensors, and `local` if it has a window."""
    types: list[str] = []
    for layer in map(list, caches):
        states = [entry for entry in layer if isinstance(entry, State)]
        windows = [entry.window for entry in layer if isinstance(entry, Cached)]
        attention = local if windows and windows[0] is not None else "full_attention"
        if states:
            types.append("hybrid" if windows else "linear_attention")
        else:
            types.append(attention if windows else "moe")  # transformers gives such layers no cache
    return types


def may_store_caches(caches: Iterable[Iterable[Cached | State]], depth: int | None) -> bool:
    """Return True if a cache of transformers can store the caches: in each layer, states, and two tensors of tokens.

    All windows and chunks must have the same size, and no layer with a window may also have states.
    """
    layers = [list(layer) for layer in caches]
    if len(layers) != depth or not any(layers):
        return False
    windows: set[int] = set()
    for layer in layers:
        tokens = [entry.window for entry in layer if isinstance(entry, Cached)]
        if len(tokens) not in (0, 2) or len(set(tokens)) > 1 or (len(tokens) < len(layer) and any(tokens)):
            return False
        windows |= {window for window in tokens if window is not None}
    return len(windows) <= 1


def join_updates(functions: dict[Key, Function]) -> bool:
    """Cache keys and values in a single call, as transformers does. Return False if a layer caches them separately.

    The functions that templates define are removed.
    """
    name = update_cache.__name__
    for written in (update_cache, layer_states):
        functions.pop((None, written), None)
    for function in functions.values():
        function.uses.pop(layer_states.__name__, None)
        if name not in function.uses:
            continue
        for block in statement_blocks(function.body):
            _join_steps(block)
        pairs = _Pairs()
        function.body = [pairs.visit(step) for step in function.body]
        calls = [node for step in function.body for node in ast.walk(step) if _index_of(node) is not None]
        if len(calls) > pairs.count:
            return False
        del function.uses[name]
    return True


def _index_of(node: ast.AST) -> int | None:
    """Return the index of the tensor that a call caches, -1 if it varies; None for any other expression."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == update_cache.__name__):
        return None
    last = [*node.args, *(keyword.value for keyword in node.keywords)][-1]
    return last.value if isinstance(last, ast.Constant) and isinstance(last.value, int) else -1


def _join_steps(steps: list[ast.stmt]) -> None:
    """Merge adjacent assignments `k = ...` and `v = ...`."""
    for index in range(len(steps) - 2, -1, -1):
        first, second = steps[index : index + 2]
        if not (isinstance(first, ast.Assign) and isinstance(second, ast.Assign)):
            continue
        if _index_of(first.value) == 0 and _index_of(second.value) == 1:
            names, values = [*first.targets, *second.targets], [first.value, second.value]
            steps[index : index + 2] = [ast.Assign([ast.Tuple(names)], ast.Tuple(values), lineno=0)]


class _Pairs(ast.NodeTransformer):
    """Replaces two calls by a single call."""

    count = 0

    def visit_Tuple(self, node: ast.Tuple) -> ast.AST:
        self.generic_visit(node)
        if [_index_of(element) for element in node.elts] != [0, 1]:
            return node
        self.count += 1
        (k, context, *_), (v, *_) = (call.args for call in node.elts if isinstance(call, ast.Call))
        return ast.Call(ast.Name(update_cache.__name__), [k, v, context], [])


TENSOR = ast.Name("Tensor")
FIELDS: dict[str, ast.expr] = {
    "queries": TENSOR,
    "keys": TENSOR,
    "n_keys": ast.Name("int"),
    "options": ast.parse("dict[str, object]", mode="eval").body,
    "score_mask": ast.parse("Tensor | None", mode="eval").body,
}
"""Names of the fields of `CachedKeys` in `AttentionContext`, and their types."""


def spread_records(functions: Collection[Function], records: Records) -> None:
    """Replace arguments of type `CachedKeys` by separate arguments for its fields."""
    takers = [function for function in functions if "cached" in function.arguments]
    unpacked = {function: step for function in takers for step in function.body if _is_unpacking(step)}
    used = {
        name
        for function, unpacking in unpacked.items()
        for name in FIELDS
        if any(name in variable_names(step) for step in function.body if step is not unpacking)
    }
    for function, unpacking in unpacked.items():
        function.body.remove(unpacking)
        _take_fields(function, used)
    for function in functions:
        if CachedKeys.__name__ in function.uses:
            spread = _Spread(used, records.left(CachedKeys))
            for block in statement_blocks(function.body):
                block[:] = [step for step in map(spread.visit, block) if step is not None]
            function.set_body(function.body)
    records.pop(CachedKeys, None)


def _is_unpacking(step: ast.stmt) -> bool:
    return isinstance(step, ast.Assign) and isinstance(step.value, ast.Name) and step.value.id == "cached"


def _take_fields(function: Function, used: set[str]) -> None:
    """Replace the argument `cached` of a function by the fields in use."""
    tree, names = copy.deepcopy(function.code.tree), [name for name in FIELDS if name in used]
    index = next(i for i, argument in enumerate(tree.args.args) if argument.arg == "cached")
    tree.args.args[index : index + 1] = [ast.arg(name, FIELDS[name]) for name in names]
    parameters = {name: value for name, value in function.code.parameters.items() if name != "cached"}
    parameters |= {name: inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in names}
    function.code = replace(function.code, tree=tree, parameters=parameters)
    del function.arguments["cached"]
    function.arguments |= dict.fromkeys(names, SOME_VALUE)
    function.needed |= used


class _Spread(ast.NodeTransformer):
    """Passes the fields of a record where the record is an argument."""

    def __init__(self, used: set[str], fields: Collection[str]) -> None:
        self.used = used
        self.fields = fields
        self.values: list[ast.expr] = []

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        if isinstance(node.value, ast.Call) and ast.unparse(node.value.func) == CachedKeys.__name__:
            values = zip(self.fields, node.value.args, strict=True)
            self.values = [value for name, value in values if name in self.used]
            return None
        return self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        args = [[*self.values] if ast.unparse(argument) == "cached" else [argument] for argument in node.args]
        return ast.Call(node.func, [value for values in args for value in values], node.keywords)


def renamed_code(text: str, *, only_positions: bool, masks: str | None) -> str:
    """Return code with the names and types that its arguments have in a folder.

    If `only_positions`, a `TokenPositions` has only one field, which replaces it. The argument `masks` is a `Masks`.
    """
    names = {"past": "positions" if only_positions else "tokens", "caches": "past_key_values"}
    return steps_text(_Renamed(names, masks).visit(ast.parse(text)).body)


class _Renamed(ast.NodeTransformer):
    def __init__(self, names: Mapping[str, str], masks: str | None) -> None:
        self.names = names
        self.masks = masks

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self.generic_visit(node)
        arguments = {argument.arg for argument in node.args.args}
        for argument in node.args.args:
            is_renamed, argument.arg = argument.arg in self.names, self.names.get(argument.arg, argument.arg)
            if argument.arg == self.masks and arguments & {"past", "positions", "queries"}:
                argument.annotation = ast.Name(Masks.__name__)
            elif is_renamed or (argument.arg == "positions" and argument.annotation is None):
                argument.annotation = ast.Name(TYPES[argument.arg])
                node.args.defaults = []  # all calls have all arguments
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and node.target.id in TYPES:
            node.annotation = ast.Name(TYPES[node.target.id])
        elif self.masks == "score_mask" and ast.unparse(node.target) == self.masks:
            node.annotation = ast.Name(Masks.__name__)
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name(self.names.get(node.id, node.id))

    def visit_keyword(self, node: ast.keyword) -> ast.AST:
        self.generic_visit(node)
        return ast.keyword(self.names.get(node.arg or "", node.arg), node.value)

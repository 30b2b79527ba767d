"""The two files of code: the modeling file with the ejected modules of a model, and the configuration file."""

from __future__ import annotations

import ast
import copy
import re
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from string import Template
from typing import Any, NamedTuple

import torch
from torch import nn

from tfkit.building.builder import assemble_model
from tfkit.building.initialize import Rule, init_rules
from tfkit.checkpoint.llama_names import LlamaNames
from tfkit.checkpoint.remote_code import BODY, DECODER, ENCODER
from tfkit.component import Cached, FFNConfig, State
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.graph.wiring import table_owner
from tfkit.nn import Past, Softmax
from tfkit.tools.eject.classes import Classes
from tfkit.tools.eject.cleanup import statement_blocks, variable_names
from tfkit.tools.eject.config import CONFIG, ConfigClass, Named, with_names
from tfkit.tools.eject.initial_weights import InitialWeights
from tfkit.tools.eject.inline import draw_in, draw_in_expressions
from tfkit.tools.eject.patterns import prepare_patterns
from tfkit.tools.eject.remote_code import dynamic_cache
from tfkit.tools.eject.remote_code.attention import ChosenAttention, choose_attention
from tfkit.tools.eject.remote_code.engines import key_heads, runs_in_engines
from tfkit.tools.eject.remote_code.llama_config import LlamaFields
from tfkit.tools.eject.remote_code.parallel_plan import experts_of
from tfkit.tools.eject.remote_code.parts import CAUSAL, Body, ParallelPlan, Parts, parts_of
from tfkit.tools.eject.remote_code.renaming import rename_modules
from tfkit.tools.eject.remote_code.separate import separated_model
from tfkit.tools.eject.specialise import Function, Specialiser
from tfkit.tools.eject.text import docs_text, in_docs, steps_text
from tfkit.tools.eject.torch_modules import merge_equal, record_arguments
from tfkit.tools.eject.values import ANY_VALUE, NONE, SOME_VALUE, AbstractValue, Items, Maybe, may_be_none
from tfkit.tools.eject.write import check_no_shared_tensors, file_docstring, formatted_code, imports_and_definitions

TEMPLATES = Path(__file__).with_name("templates")
KEY = re.compile(r"#\[(?P<end>/)?(?P<negated>not )?(?P<flag>\w+)\]")
"""A line of a template that begins or ends a section for models with, or without, a property."""
RESERVED_NAMES = frozenset(
    {"temperature", "top_k", "top_p", "min_p", "max_length", "min_length", "num_beams", "length_penalty", "dtype"}
)
"""Names that transformers uses, for settings of generation or elsewhere."""
ATTRIBUTES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "d_head",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "max_len",
}
"""Fields of the config under the names that transformers uses."""
SOURCES = {"input_ids": "token ids", "pixel_values": "images", "input_features": "features [b, width, t]"}
"""Descriptions of inputs, by their names in transformers."""
ROUTER_LOGITS = "router_logits"
"""The name of the logits of experts, both in transformers and among the `inner_values` of an FFN."""
ROLES = {"attentions": "attention", "cross_attentions": "cross_attention"}
"""The names of recorded weights, and the roles of the sublayers that compute them."""
OTHER_CACHES = ("reformer", "minimax", "xlnet", "rwkv", "xlstm")
"""Words in the name of a class by which transformers knows models that take no `DynamicCache`."""
DECODER_NAMES = ("language_model", "text_model", "decoder", "text_decoder")
"""Names of modules that transformers takes for a decoder that takes token ids."""
LOSSES = {
    "ForCausalLM": "self.loss_function(logits, labels, self.config.vocab_size, **kwargs)",
    "ForMaskedLM": "self.loss_function(logits, labels, self.config.vocab_size, **kwargs)",
    "ForSeq2SeqLM": "self.loss_function(logits, labels, self.config.vocab_size, shift_labels=labels, **kwargs)",
    "ForSpeechSeq2Seq": "self.loss_function(logits, labels, self.config.vocab_size, shift_labels=labels, **kwargs)",
    "ForTokenClassification": "self.loss_function(logits, labels, self.config, **kwargs)",
    "ForSequenceClassification": "self.loss_function(labels, logits, self.config, **kwargs)",
    "ForImageClassification": "self.loss_function(labels, logits, self.config, **kwargs)",
    "ForAudioClassification": "self.loss_function(labels, logits, self.config, **kwargs)",
}
"""The call of the loss by task. The functions of transformers have different orders of arguments."""


class LocalAttention(NamedTuple):
    """The names of windows or chunks in transformers."""

    type: str
    """The type of a layer."""
    size: str
    """The field of the config with their size."""
    function: str
    """The function that computes the mask."""


LOCAL_ATTENTION = (
    LocalAttention("sliding_attention", "sliding_window", "create_sliding_window_causal_mask"),
    LocalAttention("chunked_attention", "attention_chunk_size", "create_chunked_causal_mask"),
)
"""Windows, and chunks."""


def model_type(file: str) -> str:
    """Return the `model_type` in config.json. No class of transformers has it, so none opens the folder by accident."""
    return f"{file}_tfkit"


class WrittenCode(NamedTuple):
    """The code of a folder.

    Attributes:
        name: the prefix of the names of its classes.
        file: the suffix of the names of its two files.
        modeling: the contents of the modeling file.
        configuration: the contents of the configuration file.
        fields: the values of the config.
    """

    name: str
    file: str
    modeling: str
    configuration: str
    fields: Mapping[str, Any]


def code_of(graph: Graph, names: LlamaNames | None = None, plan: ParallelPlan | None = None) -> WrittenCode:
    """Write the code of a model, by default with the names of its modules and without plans for several processes.

    Raise SpecError if transformers has no such models, or the model cannot be ejected.
    """
    last = parts_of(graph).last
    has_states = any(isinstance(entry, State) for layer in last.decoding.caches for entry in layer)
    dynamic = last.decodes and last.memory is None and dynamic_cache.may_store_caches(last.decoding.caches, last.depth)
    code = _code_of(graph, names, plan, dynamic=True, passing=True) if dynamic and not has_states else None
    code = code or (_code_of(graph, names, plan, dynamic=True) if dynamic else None) or _code_of(graph, names, plan)
    assert code is not None
    return code


def _code_of(
    graph: Graph,
    names: LlamaNames | None,
    plan: ParallelPlan | None,
    *,
    dynamic: bool = False,
    passing: bool = False,
) -> WrittenCode | None:
    """Write the code of a model; return None if its layers are not suitable.

    Args:
        graph: the model.
        names: the names of the modules in the folder; None for the names of the model.
        plan: the plans with which transformers divides the model among processes.
        dynamic: whether it uses the caches and masks of transformers.
        passing: whether keyword arguments of the forward reach the attention function.
    """
    named, config = with_names(graph, RESERVED_NAMES)
    with torch.device("meta"), record_arguments() as sizes:
        named = _with_gaps(named)
        model = assemble_model(named)
        parts = replace(parts_of(named), names=names, plan=plan)
        name = type(model).__name__
        rules = {
            parts.name_in_class(part): rule
            for path, rule in init_rules(model, graph).items()
            for part in (names.parts_of(path, model.get_submodule(path)) if names else []) or [path]
        }
        rules |= {parts.tied_matrix: Rule("linear")} if parts.tied_matrix else {}
        root = separated_model(model, parts, name)
    prepare_patterns(root)
    check_no_shared_tensors(root)
    merge_equal(root)
    modules = {body: root.get_submodule(parts.path_of(body)) for body in parts.bodies}
    routers = _routers_of(parts, modules[parts.last])
    recorded = [router.module for router in routers]
    caches = parts.last.decoding.caches
    scores = _scores_of(root, caches, passing=passing) if dynamic else NO_SCORES
    replacements = dynamic_cache.WITH_STATES if scores.recurrent else dynamic_cache.INSTEAD
    specialiser = Specialiser(root, replacements if dynamic else None, recorded)
    if (passing and not scores.plain) or (dynamic and not scores.causal):
        return None
    specialiser.run(
        ({root: {}} if parts.head else {})
        | {module: _argument_values(body, specialiser, scores, dynamic=dynamic) for body, module in modules.items()}
    )
    if dynamic and not dynamic_cache.join_updates(specialiser.functions):
        return None
    draw_in_expressions(specialiser.functions, specialiser.read)
    if dynamic:
        dynamic_cache.spread_records(specialiser.functions.values(), specialiser.records)
    draw_in(specialiser.functions, specialiser.read)
    experts = _experts_of(parts, modules[parts.last]) if plan is not None and plan.experts else []
    for module in experts:
        _divide_experts(specialiser, module)
    if names is not None:
        rename_modules(specialiser, modules[parts.last], names)
    for function in specialiser.functions.values():
        _narrow_result(function)
        _type_lists(function)
    chosen = choose_attention(specialiser.functions.values(), root, causal=dynamic, in_context=passing)
    if passing and not (chosen.callers and chosen.callers == chosen.in_context):
        return None
    inside = [*modules.values(), root]
    weights = InitialWeights(
        graph.spec.model.init, rules, {path: _module_at(inside, path) for path in rules}, specialiser
    )
    prefixes = [f"{path}." for body in parts.bodies if (path := parts.path_of(body))]
    classes = Classes(graph, specialiser, sizes, config, prefixes)
    return _ModelingWriter(
        graph, parts, name, specialiser, classes, config, weights, modules, chosen, scores, routers, experts, dynamic
    ).code()


class RouterModule(NamedTuple):
    """A module that computes logits of experts, its path in a layer of the folder, and their index in its output."""

    module: nn.Module
    path: str
    item: int


def _routers_of(parts: Parts, body: nn.Module) -> list[RouterModule]:
    """Return the routers of the layers of a decoder; empty for other models, whose outputs have no router logits."""
    stack = parts.last.stack
    if parts.task is not CAUSAL or stack.stack is None:
        return []
    routers = []
    for index, layer in enumerate(stack.stack.layers):
        for step in layer.steps:
            value = step.config.inner_values.get(ROUTER_LOGITS) if isinstance(step.config, FFNConfig) else None
            if value is not None and value.argument is None:
                path = f"{stack.name}.layers.{index}.{step.name}.{value.module}"
                in_layer = parts.name_in_class(path).rpartition(f"layers.{index}.")[2]
                routers.append(RouterModule(body.get_submodule(path), in_layer, value.item))
    return routers


def _experts_of(parts: Parts, body: nn.Module) -> list[nn.Module]:
    """Return the modules with experts that processes can divide, each once."""
    stack = parts.last.stack
    assert stack.stack is not None
    layers = [index for index, layer in enumerate(stack.stack.layers) if any(s.name == "ffn" for s in layer.steps)]
    modules = [experts_of(body.get_submodule(f"{stack.name}.layers.{index}.ffn")) for index in layers]
    return [*dict.fromkeys(module for module in modules if module is not None)]


def _divide_experts(specialiser: Specialiser, experts: nn.Module) -> None:
    """Let a module with experts run the experts of its process, whose number is a property of its class.

    At inference, transformers gives the first id after the ids of the process to experts of other processes, with a
    weight of 0.
    """
    forward = specialiser.functions[experts, "forward"]
    _, chosen, *_ = forward.parameters
    limited = ast.parse(f"{chosen} = {chosen}.clamp(max={forward.self_name}.num_experts - 1)").body
    forward.set_body([*limited, *forward.body])
    specialiser.read.setdefault(experts, set()).update({CONFIG, "n_experts"})
    experts.__dict__["n_experts"] = experts.__dict__.pop("num_experts")
    experts.__dict__[CONFIG] = config = Named()
    config.text = CONFIG


class Scores(NamedTuple):
    """The scores of all attentions of a decoder.

    Attributes:
        causal: True if each query attends to all earlier keys, or to those in a window or in its chunk.
        windows: True if some attentions have a window or chunks.
        chunks: True if they have chunks.
        full: True if some attentions have no window.
        skips: True if a missing mask is causal for all attentions without a window.
        plain: True if no attention has a window, and a missing mask is causal: they depend only on queries and keys.
        biased: True if they depend on the distance of queries and keys.
        passing: True if keyword arguments of the forward reach the function that computes them.
        recurrent: True if some layers carry states.
        counts: True if some layers have attention, for which positions are counted.
    """

    causal: bool
    windows: bool
    chunks: bool
    full: bool
    skips: bool
    plain: bool
    biased: bool
    passing: bool
    recurrent: bool
    counts: bool


def _scores_of(model: nn.Module, caches: Sequence[Sequence[Cached | State]], *, passing: bool) -> Scores:
    recurrent = any(isinstance(entry, State) for layer in caches for entry in layer)
    contexts = dynamic_cache.attention_contexts(model, caches)
    biased = any(context.position is not None or context.relative is not None for context in contexts)
    windows = [context for context in contexts if context.ring]
    full = [context for context in contexts if not context.ring]
    chunks = [context for context in windows if context.left is None and dynamic_cache.is_chunk(context.rule)]
    causal = all(context.right == 0 and (context.rule is None or context in chunks) for context in contexts)
    causal = causal and all(context.left is None for context in full) and not (windows and biased)
    causal = causal and chunks in ([], windows)
    skips = all(context.flag for context in full)
    for context in dynamic_cache.contexts_of(model):
        context.chooses_mask = bool(windows and full)
        context.recurrent = recurrent
    return Scores(
        causal=causal,
        windows=bool(windows),
        chunks=bool(chunks),
        full=bool(full),
        skips=skips,
        plain=skips and not windows,
        biased=biased,
        passing=passing,
        recurrent=recurrent,
        counts=bool(contexts),
    )


NO_SCORES = Scores(*[False] * len(Scores._fields))
"""The scores of other models."""


def _argument_values(
    body: Body, specialiser: Specialiser, scores: Scores, *, dynamic: bool
) -> dict[str, AbstractValue]:
    """Return the known values of the arguments of a body, beyond whether they may be None."""
    if not body.decodes:
        return {}
    if dynamic:
        keys = SOME_VALUE if scores.biased else NONE
        options = SOME_VALUE if scores.passing else NONE
        several = scores.windows and scores.full
        mask = specialiser.records.add(dynamic_cache.Masks, [ANY_VALUE, ANY_VALUE]) if several else ANY_VALUE
        fields = [SOME_VALUE, keys, options, mask if scores.recurrent else NONE]
        past = specialiser.records.add(dynamic_cache.TokenPositions, fields) if scores.counts else NONE
        arguments: dict[str, AbstractValue] = {"past": past}
        if several and not scores.recurrent:
            arguments["mask"] = mask
        return arguments
    values: dict[str, AbstractValue] = {
        "past": Maybe(specialiser.records.add(Past, [SOME_VALUE, SOME_VALUE, ANY_VALUE]))
    }
    values |= {
        name: Maybe(Items(Items(Items(SOME_VALUE)))) for name in ("caches", "memory_caches")[: 1 + bool(body.memory)]
    }
    return values


def _module_at(parts: Sequence[nn.Module], path: str) -> nn.Module:
    """Return the module at a path in the first part that has it."""
    children = [dict(part.named_modules(remove_duplicate=False)) for part in parts]
    return next(modules[path] for modules in children if path in modules)


def _with_gaps(graph: Graph) -> Graph:
    """Return a graph in which padding may be between tokens, as transformers allows."""
    nodes = []
    for node in graph.nodes:
        signals = {
            name: signal if isinstance(signal, list) else replace(signal, gaps=True)
            for name, signal in node.signals.items()
        }
        nodes.append(replace(node, signals=signals))
    return replace(graph, nodes=tuple(nodes))


def _narrow_result(function: Function) -> None:
    """Remove None from the type of a result that is never None, for type checkers."""
    returns = function.code.tree.returns
    is_open = isinstance(returns, ast.BinOp) and ast.unparse(returns.right) == "None"
    if isinstance(returns, ast.BinOp) and is_open and not may_be_none(function.result):
        tree = copy.deepcopy(function.code.tree)
        tree.returns = returns.left
        function.code = replace(function.code, tree=tree)


def _type_lists(function: Function) -> None:
    """Annotate lists that stay empty as lists of tensors, as TorchScript treats them."""
    text = "\n".join(map(ast.unparse, function.body))
    for block in statement_blocks(function.body):
        block[:] = [part for step in block for part in _split_empty_lists(step)]
        for index, step in enumerate(block):
            target = step.targets[0] if isinstance(step, ast.Assign) and ast.unparse(step.value) == "[]" else None
            if isinstance(target, ast.Name) and f"{target.id}.append" not in text:
                annotation = ast.parse("list[Tensor]", mode="eval").body
                block[index] = ast.AnnAssign(target, annotation, ast.List([]), simple=1)


def _split_empty_lists(step: ast.stmt) -> list[ast.stmt]:
    """Split `a, b = c, []` into two statements."""
    if not (isinstance(step, ast.Assign) and isinstance(step.value, ast.Tuple)):
        return [step]
    target = step.targets[0]
    if not (isinstance(target, ast.Tuple) and "[]" in map(ast.unparse, step.value.elts)):
        return [step]
    pairs = zip(target.elts, step.value.elts, strict=True)
    return [ast.Assign([left], right, lineno=0) for left, right in pairs]


@dataclass
class _ModelingWriter:
    """Writes the two files from their templates."""

    graph: Graph
    parts: Parts
    name: str
    specialiser: Specialiser
    classes: Classes
    config: ConfigClass
    weights: InitialWeights
    modules: Mapping[Body, nn.Module]
    chosen: ChosenAttention
    scores: Scores
    routers: Sequence[RouterModule]
    experts: Sequence[nn.Module]
    dynamic: bool

    def __post_init__(self) -> None:
        self.file = re.sub(r"\W", "_", self.graph.name).lower()
        self.local = LOCAL_ATTENTION[self.scores.chunks]
        self.words = {
            "name": self.name,
            "file": self.file,
            "description": in_docs(self.graph.name),
            "cache": "Cache" if self.dynamic else f"{self.name}Cache",
            "skips": 'self.config._attn_implementation == "sdpa"' if self.scores.skips else "False",
        }

    def code(self) -> WrittenCode:
        """Return both files."""
        modeling = self._modeling()
        numbers, properties = self.config.fields(modeling)
        fields: dict[str, Any] = {name: value for name, value in self._fields().items() if name not in numbers}
        fields |= numbers
        caches = self.parts.last.decoding.caches
        types = dynamic_cache.layer_types(caches, self.local.type)
        attributes = {theirs: ours for theirs, ours in ATTRIBUTES.items() if ours in fields}
        rope: Mapping[str, Any] = {}
        if self.parts.names is not None:
            llama = LlamaFields.of(self.parts.last.stack, fields)
            modeling, rope, attributes = formatted_code(llama.code(modeling)), llama.rope, {}
            properties = llama.code("\n".join(properties), "self").splitlines()
            fields = llama.values(fields)
        lines = [f"    {name}: {_type_name(value)} = {value!r}" for name, value in fields.items()]
        lines += [f"    rope_parameters: dict[str, Any] = field(default_factory=lambda: {rope!r})"] if rope else []
        fields |= {"rope_parameters": dict(rope)} if rope else {}
        words = self.words | {
            "model_type": model_type(self.file),
            "attribute_map": repr(attributes),
            "tensor_plan": repr(dict(self.parts.plan.tensor) if self.parts.plan else {}),
            "expert_plan": repr(dict(self.parts.plan.experts) if self.parts.plan else {}),
            "fields": "\n".join([*lines, *properties]),
            "layer_types": repr(types),
            "n_states": str(max(map(len, caches), default=0)),
        }
        flags = {
            "decodes": self.parts.decodes,
            "encodes": len(self.parts.bodies) > 1,
            "routes": bool(self.routers),
            "aliases": bool(attributes),
            "rope": bool(rope),
            **self._plan_flags(),
            "tokens": any(body.embedding for body in self.parts.bodies),
            "typed": self.dynamic and len({*types, "full_attention"}) > 1 and {*types} != {self.local.type},
            **self.scores._asdict(),
        }
        configuration = formatted_code(_filled_template("configuration", words, flags))
        return WrittenCode(self.name, self.file, modeling, configuration, fields)

    def _fields(self) -> dict[str, Any]:
        """Return the fields of the config that tools use even if the model does not."""
        last = self.parts.last
        layers, length = last.stack.stack, max_len(self.graph)
        table = last.embedding.config.table() if last.embedding else None
        fields: dict[str, Any] = {"d_model": last.stack.output.width}
        fields |= {} if table is None else {"vocab_size": table.rows}
        fields |= {} if layers is None else {"n_layers": layers.depth}
        fields |= {} if length is None else {"max_len": length}
        fields |= {name: self.config.numbers[name] for name in ATTRIBUTES.values() if name in self.config.numbers}
        fields |= key_heads(self.parts, self.config.numbers)
        fields |= {"is_encoder_decoder": True} if len(self.parts.bodies) > 1 else {}
        fields |= {self.local.size: max(filter(None, self._windows))} if self.scores.windows else {}
        return {**fields, "tie_word_embeddings": bool(self.parts.ties), "use_cache": self.parts.decodes}

    def _modeling(self) -> str:
        parts, modules = self.parts, self.modules
        roots = [self.classes.of[module] for module in {*modules.values(), self.specialiser.model}]
        roots += [self.classes.of[self.specialiser.model.get_submodule(BODY)]] if parts.head else []
        layers = [name for body in parts.bodies for name in self._layer_classes(body)]
        experts = [self.classes.of[module] for module in self.experts]
        for ejected in self.classes.order:
            if ejected in experts:
                ejected.base = "DividedExperts"
            if ejected.name in layers:
                ejected.base = "GradientCheckpointingLayer"
            if ejected.filling and ejected not in roots:
                ejected.methods.append(_method_text("reset_parameters", ejected.filling))
                ejected.filling = ["self.reset_parameters()"]
        imports, definitions_ = imports_and_definitions(self.specialiser, self.weights.uses)
        definitions_ += [ejected.source(self.config) for ejected in self.classes.order if ejected not in roots]
        states = any(isinstance(entry, State) for layer in parts.last.decoding.caches for entry in layer)
        first, embedded = parts.bodies[0], any(body.embedding for body in parts.bodies)
        flags = {
            "tokens": first.embedding is not None,
            "embeds": embedded,
            "encodes": len(parts.bodies) > 1,
            "separate": len(parts.bodies) > 1 and not self._is_shared,
            "states": states,
            "decodes": parts.decodes,
            "attends": bool(self.chosen.callers),
            "eager": bool(self.chosen.cores),
            "dynamic": self.dynamic,
            **self.scores._asdict(),
            "masks": self.dynamic and not self.scores.plain,
            "engines": self.scores.passing and runs_in_engines(parts, modules[parts.last], self._fields()),
            **self._plan_flags(),
        }
        helpers = [_filled_template("attention", {}, flags)] if self.chosen.callers else []
        if self.dynamic:
            definitions_ = list(map(self._renamed, definitions_))
            helpers.append(_filled_template("columns", self.words, flags))
        context = next((i for i, text in enumerate(definitions_) if text.startswith("class Context(")), -1)
        definitions_[context + 1 : context + 1] = helpers
        bodies = [self._body(body) for body in parts.bodies]
        bodies += [self._encoder_decoder()] if len(bodies) > 1 else []
        written = [parts.task.class_name, *[body.class_end for body in parts.bodies], "Model", "PreTrainedModel"]
        words = self.words | {
            "docs": file_docstring(self.graph) + "\n",
            "imports": imports + "\nfrom torch.nn import functional as F",
            "outputs": f", {output}" if (output := self._output) else "",
            "argument": first.argument,
            "definitions": "\n\n\n".join(definitions_),
            "cache": self._cache(states=states) if parts.decodes and not self.dynamic else "",
            "no_split": repr(list(dict.fromkeys(layers))),
            "init_weights": textwrap.indent(self._init_weights(), "    ").lstrip(),
            "bodies": "\n\n\n".join(bodies),
            "head": self._head() if parts.head else "",
            "classes": repr(sorted({f"{self.name}{end}" for end in written if end})),
        }
        text = _filled_template("modeling", words, flags).replace("config: Config", f"config: {self.name}Config")
        return formatted_code(text.replace("config.n_classes", "config.num_labels"))

    @property
    def _output(self) -> str:
        """The class of the results; empty without a head."""
        return "MoeCausalLMOutputWithPast" if self.routers else self.parts.task.output

    @property
    def _is_shared(self) -> bool:
        """True if all bodies share a token table."""
        embeddings = [body.embedding for body in self.parts.bodies if body.embedding is not None]
        return len({table_owner(self.graph, node.name) for node in embeddings}) == 1

    @property
    def _windows(self) -> list[int | None]:
        """For each layer, the number of tokens that it caches; None if it caches all, or has no cache of tokens."""
        layers = self.parts.last.decoding.caches
        return [next((entry.window for entry in layer if isinstance(entry, Cached)), None) for layer in layers]

    @property
    def _has_windows(self) -> bool:
        """True if a layer caches only the tokens in a window."""
        return any(
            isinstance(entry, Cached) and entry.window for layer in self.parts.last.decoding.caches for entry in layer
        )

    def _cache(self, *, states: bool) -> str:
        """Return the class for the cache."""
        decoding, windows = self.parts.last.decoding, self._has_windows
        words = {
            "sizes": self._sizes(decoding.caches, windows=windows),
            "memory_sizes": self._sizes(decoding.memory_caches, windows=False) if decoding.memory_caches else "",
            "ragged": "(mask is not None or self.keeps_all)" if windows else "mask is not None",
            "is_croppable": "False" if states else "self.keeps_all",
        }
        flags = {"windows": windows, "states": states, "bounded": windows or states}
        return _filled_template("cache", self.words | words, flags | {"memory": bool(decoding.memory_caches)})

    def _body(self, body: Body) -> str:
        """Return the class of a body."""
        layers, vector = self._layer_classes(body), body is self.parts.last and self.parts.vector is not None
        output = "BaseModelOutputWithPast" if body.decodes else "BaseModelOutput"
        output = "MoeModelOutputWithPast" if self.routers else output
        output += "AndCrossAttentions" if body.memory else ""
        further = ", past_key_values" if body.decodes else ", pooled" if vector else ""
        steps = self._steps(self.modules[body], "x, pooled" if vector else "x")
        flags = self._flags(body) | {"masked": body.is_masked, "masks_memory": _has_variable(steps, "memory_mask")}
        signal = self.graph.inputs[body.input]
        image = (signal.channels, signal.rows, signal.width) if signal.type == "image" else ()
        flags |= {"image": bool(image), "several": self.scores.windows and self.scores.full}
        methods = self.classes.of[self.modules[body]].methods[1:]  # without the forward
        flags["methods"] = bool(methods)
        stack = self.parts.name_in_class(body.stack.name)
        flags["named_decoder"] = body.decodes and not body.memory and stack in DECODER_NAMES
        rope = {} if self.parts.names is None else LlamaFields.of(body.stack, self.config.numbers).rope
        flags["rope"] = bool(rope)
        words = {
            "class_name": f"{self.name}{body.class_end}",
            "rope_type": rope.get("rope_type", ""),
            "returns": f"{SOURCES[body.argument]} to vectors",
            "recorded": self._recorded(body, layers),
            "init": _indented_text(self.classes.of[self.modules[body]].lines()),
            "embedding": self.parts.name_in_class(f"{body.embedding.name}.tokens") if body.embedding else "",
            "argument": body.argument,
            "tensor": f"{body.argument}.transpose(1, 2)" if body.argument == "input_features" else body.argument,
            "output": "BaseModelOutputWithPooling" if vector else output,
            "methods": textwrap.indent("\n\n".join(map(self._renamed, methods) if self.dynamic else methods), "    "),
            "steps": _indented_text(steps),
            "further": further,
            "image_shape": str(image),
            "image_sizes": str(image)[1:-1],
            "state_sizes": self._sizes(body.decoding.caches, windows=False) if self.scores.recurrent else "",
            "local_attention": self.local.type,
            "only_attention": self.local.type if self.scores.windows else "full_attention",
            "create_local_mask": self.local.function,
            "mask_sizes": f", {self.local.size}=config.{self.local.size}" if self.scores.windows else "",
        }
        return _filled_template("body", self.words | words, flags)

    def _recorded(self, body: Body, layers: Sequence[str]) -> str:
        """Return the outputs of a body that transformers can record, each with the classes that compute it."""
        outputs = {"hidden_states": list(layers)}
        for name, role in ROLES.items():
            classes = [(self.classes.of[module].name, path) for module, path in self._weighing_modules(body, role)]
            # The paths of modules tell the attentions of a layer apart.
            texts = [f"OutputRecorder({kind}, 1, {path!r})" if body.memory else kind for kind, path in classes]
            outputs |= {name: [*dict.fromkeys(texts)]} if texts else {}
        routers = [
            f"OutputRecorder({self.classes.of[router.module].name}, {router.item}, {router.path!r})"
            for router in self.routers
        ]
        outputs |= {ROUTER_LOGITS: [*dict.fromkeys(routers)]} if routers else {}
        items = [f"{name!r}: {_text_or_list(texts)}" for name, texts in outputs.items()]
        return f"{{{', '.join(items)}}}"

    def _weighing_modules(self, body: Body, role: str) -> list[tuple[nn.Module, str]]:
        """Return the modules that compute attention weights, with their paths in a layer.

        The result is empty unless each attention of a role has such a module.
        """
        assert body.stack.stack is not None
        modules: list[tuple[nn.Module, str]] = []
        for index, layer in enumerate(body.stack.stack.layers):
            for step in layer.steps:
                if step.role != role:
                    continue
                path = self.parts.name_in_class(f"{body.stack.name}.layers.{index}.{step.name}")
                sublayer = self.modules[body].get_submodule(path)
                core: Any = getattr(sublayer, "core", None)
                softmax = getattr(core, "softmax", None)
                if not isinstance(core, nn.Module):
                    return []
                name = path.rpartition(".")[2]
                if core in self.chosen.cores:
                    modules.append((core, f"{name}.core"))
                elif isinstance(softmax, Softmax) and not self.chosen.callers & {*core.modules()}:
                    modules.append((softmax, f"{name}.core.softmax"))
                else:
                    return []
        return modules

    def _encoder_decoder(self) -> str:
        """Return the class that joins an encoder and a decoder."""
        encoder, decoder = self.parts.bodies
        ties = {name: owner for name, owner in self._ties(f"{BODY}.").items() if name.startswith(DECODER)}
        words = {
            "source": SOURCES[encoder.argument],
            "encoder": self.name + encoder.class_end,
            "decoder": self.name + decoder.class_end,
            "argument": encoder.argument,
            "ties": repr(ties),
            "embedded": DECODER if encoder.embedding is None else ENCODER,
        }
        shared = encoder.embedding is not None and self._is_shared
        flags = {"tokens": encoder.embedding is not None, "ties": bool(ties), "shared": shared}
        return _filled_template("encoder_decoder", self.words | words, flags)

    def _head(self) -> str:
        """Return the class with the head."""
        parts, (first, *_) = self.parts, self.parts.bodies
        flags = self._flags(parts.last)
        flags |= {"tokens": first.embedding is not None, "masked": first.is_masked or flags["memory"]}
        steps, ties = self._steps(self.specialiser.model, "logits"), self._ties("")
        ties = {name: owner for name, owner in ties.items() if not name.startswith(BODY)}
        lines = self.classes.of[self.specialiser.model].lines()
        words = {
            "suffix": parts.task.class_name,
            "source": SOURCES[first.argument],
            "returns": parts.task.returns,
            "ties": repr(ties),
            "init": _indented_text(sorted(lines, key=lambda line: not line.startswith(f"self.{BODY} "))),
            "argument": first.argument,
            "arguments": ", ".join(_body_arguments(first, flags)),
            "steps": _indented_text(steps),
            "output": self._output,
            "loss": LOSSES[parts.task.auto],
        }
        flags |= {"ties": bool(ties), "windows": self._has_windows, "pools": _has_variable(steps, "mask")}
        flags |= {"mamba": "mamba" in self.name.lower()}
        flags["misnamed"] = any(name in self.name.lower() for name in OTHER_CACHES)
        flags |= self._plan_flags()
        return _filled_template("head", self.words | words, flags)

    def _plan_flags(self) -> dict[str, bool]:
        plan = self.parts.plan
        return {
            "divided": plan is not None and bool(plan.tensor),
            "piped": plan is not None and plan.pipeline,
            "by_expert": plan is not None and bool(plan.experts),
        }

    def _flags(self, body: Body) -> dict[str, bool]:
        return {
            "tokens": body.embedding is not None,
            "types": body.types is not None,
            "decodes": body.decodes,
            "memory": body.memory is not None,
            "dynamic": self.dynamic,
            **self.scores._asdict(),
        }

    def _ties(self, prefix: str) -> dict[str, str]:
        """Return the names of tied tensors in a class, each with its original."""
        return {name.removeprefix(prefix): owner.removeprefix(prefix) for name, owner in self.parts.ties.items()}

    def _layer_classes(self, body: Body) -> list[str]:
        """Return the names of the classes of the layers."""
        layers = self.modules[body].get_submodule(self.parts.name_in_class(f"{body.stack.name}.layers"))
        return list(dict.fromkeys(self.classes.of[layer].name for layer in layers.children()))

    def _sizes(self, caches: Sequence[Sequence[Cached | State]], *, windows: bool) -> str:
        """Return an expression for the shapes of the cached tensors."""
        layers = [f"[{', '.join(self._size(entry, windows) for entry in layer)}]" for layer in caches]
        runs = [(text, len(list(equal))) for text, equal in groupby(layers)]
        if len(runs) == 1:
            return f"{runs[0][0]} * {self.config.count(len(layers))}".replace("[", "[[", 1).replace("] *", "]] *", 1)
        return f"[{', '.join(text if n == 1 else f'*[{text}] * {n}' for text, n in runs)}]"

    def _size(self, entry: Cached | State, windows: bool) -> str:
        if isinstance(entry, State):
            sizes = [self.config.text(size) for size in (entry.heads, entry.rows, entry.width)]
            return f"State({', '.join(sizes + ['wide=True'] * entry.wide)})"
        numbers = [entry.heads, entry.width, *([entry.window] if windows else [])]
        return f"({', '.join(map(self.config.text, numbers))})"

    def _init_weights(self) -> str:
        """Return the method that initializes a module whose weights are missing in a file."""
        text = self.weights.text(self.classes)
        names = {node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name)}
        tied = self.parts.tied_matrix
        is_biased = tied is not None and self.specialiser.model.get_submodule(tied).bias is not None
        names |= {"name"} if is_biased else set()
        lines = [docs_text(type(self.graph.spec.model.init).__doc__ or "")]
        lines += ["config = self.config"] if "config" in names else []
        if "name" in names:
            lines.append('name = next((name for name, child in self.named_modules() if child is module), "")')
        reset = 'callable(reset := getattr(module, "reset_parameters", None)):\n    reset()'
        lines += [f"{text}\nelif {reset}" if text else f"if {reset}"]
        # Unlike other biases, the bias of a tied matrix does not depend on the `init`.
        lines += [f"if name == {tied!r}:\n    nn.init.zeros_(module.bias)"] if is_biased else []
        return f"@torch.no_grad()\n{_method_text('_init_weights', lines, 'self, module: nn.Module')}"

    def _steps(self, module: nn.Module, result: str) -> list[str]:
        """Return the statements of a forward, with its result assigned to a name."""
        function = self.specialiser.functions[module, "forward"]
        *steps, last = function.body
        assert isinstance(last, ast.Return)
        assert last.value is not None
        target = ast.parse(result, mode="eval").body
        steps.append(ast.Assign([target], last.value, lineno=0))
        text = steps_text(steps)
        return (self._renamed(text) if self.dynamic else text).splitlines()

    def _renamed(self, text: str) -> str:
        scores = self.scores
        only_positions = not (scores.biased or scores.passing or scores.recurrent)
        mask = "score_mask" if scores.recurrent else "mask"
        several_masks = scores.windows and scores.full
        return dynamic_cache.renamed_code(text, only_positions=only_positions, masks=mask if several_masks else None)


def _method_text(name: str, lines: Sequence[str], parameters: str = "self") -> str:
    return f"def {name}({parameters}) -> None:\n{textwrap.indent(chr(10).join(lines), '    ')}"


def _indented_text(lines: Sequence[str]) -> str:
    """Indent statements for a method of the template."""
    return textwrap.indent("\n".join(lines), " " * 8).lstrip()


def _has_variable(steps: Sequence[str], name: str) -> bool:
    return name in variable_names(ast.parse("\n".join(steps)))


def _text_or_list(texts: Sequence[str]) -> str:
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _type_name(value: Any) -> str:
    return type(value).__name__.removeprefix("Named").lower()


def _body_arguments(first: Body, flags: Mapping[str, bool]) -> list[str]:
    """Return the arguments in the head's call of the body."""
    names = [first.argument, *["attention_mask"] * flags["masked"]]
    if flags["memory"]:
        names += ["decoder_input_ids", "decoder_attention_mask", "encoder_outputs", "past_key_values"]
        names += [*["inputs_embeds"] * flags["tokens"], "decoder_inputs_embeds"]
        return [f"{name}={name}" for name in (*names, "use_cache")]
    names += [*["position_ids"] * flags["counts"], *["past_key_values"] * flags["decodes"]]
    names += [*["token_type_ids"] * flags["types"]]
    return [*names, *["inputs_embeds"] * flags["tokens"], *["use_cache=use_cache"] * flags["decodes"]]


def _filled_template(template: str, words: Mapping[str, str], flags: Mapping[str, bool]) -> str:
    """Fill a template: replace its words, and omit the sections for other models."""
    lines: list[str] = []
    omitted: list[str] = []
    for line in (TEMPLATES / f"{template}.py.txt").read_text(encoding="utf-8").splitlines():
        key = KEY.fullmatch(line)
        if key is None:
            lines += [] if omitted else [line]
        elif key["end"]:
            omitted = [flag for flag in omitted if flag != line.replace("/", "")]
        elif flags[key["flag"]] == bool(key["negated"]):
            omitted.append(line)
    return Template("\n".join(lines) + "\n").substitute(words)

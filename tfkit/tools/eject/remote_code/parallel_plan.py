"""The plans with which transformers divides a decoder among processes: tensor, pipeline and expert parallel.

A projection into an attention or an FFN is divided by its outputs (heads, hidden units), the projection back to the
residual stream by its inputs. Between them, each process computes its heads or hidden units. If they are not
independent, the outputs of the projections are gathered instead: each process then computes all heads or hidden units,
and stores only its part of the weights. Everything else is replicated. transformers divides the table of tokens.

With expert parallelism, each process has some of the experts, and gets the tokens that are routed to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor, nn

from tfkit.checkpoint.llama_names import OUTPUTS, SUBLAYERS
from tfkit.checkpoint.remote_code import transformers_map
from tfkit.component import AttentionConfig, Step
from tfkit.nn import StackedLinear
from tfkit.tools.eject.remote_code.parts import ParallelPlan, Parts

DIVIDED, GATHERED = ("colwise", "rowwise"), ("colwise_gather_output", "rowwise_split_input")
"""Styles of the projections into and out of a sublayer, if the values between them are divided, or gathered."""
NORM = "replicated_with_grad_allreduce"
"""The style of a norm with equal weights for all heads: the sum of its gradients over the heads of all processes."""
EXPERTS = {"gate_up_proj": "packed_colwise", "up_proj": "colwise", "down_proj": "rowwise"}
"""Styles of the weights of all experts, whose hidden units are divided."""
EXPERT, LOCAL, DISPATCH = "grouped_gemm", "local_params", "ep_dispatch_experts"
"""Styles of the stacked weights of experts, of the layer with such a weight, and of all experts of an FFN."""
Entries = dict[str, str]


def parallel_plan(model: nn.Module, parts: Parts, gathered: frozenset[str] = frozenset()) -> ParallelPlan:
    """Return the plans of a decoder with the names of Llama.

    `gathered` holds the sublayers, `self_attn` or `mlp`, whose heads or hidden units are gathered.
    """
    assert parts.names is not None
    body, stack = parts.last, parts.last.stack.stack
    assert stack is not None
    weights = transformers_map(model, parts.graph, parts.names)
    tensors = {name.removeprefix("model."): tensor for name, tensor in weights.tensors(model.state_dict())}
    tensor: Entries = {}
    experts: Entries = {}
    for index, layer in enumerate(stack.layers):
        for step in layer.steps:
            module = model.get_submodule(f"{parts.last.stack.name}.layers.{index}.{step.name}")
            if step.name == "ffn" and experts_of(module) is not None:
                inside = _step_tensors(f"layers.{index}.{SUBLAYERS['ffn']}.", tensors)
                experts |= {f"layers.*.{SUBLAYERS['ffn']}.{key}": style for key, style in _by_expert(inside).items()}
    for role, name in SUBLAYERS.items():
        steps = [(i, step) for i, layer in enumerate(stack.layers) for step in layer.steps if step.name == role]
        by_layer = [_step_tensors(f"layers.{i}.{name}.", tensors) for i, _ in steps]
        for by_head in (True, False):
            entries = [
                _entries(step, role, inside, divided=by_head and name not in gathered)
                for (_, step), inside in zip(steps, by_layer, strict=True)
            ]
            # A pattern applies to all layers.
            merged = {key: style for layer in entries for key, style in layer.items()}
            if all(
                layer.get(key) == style
                for layer, inside in zip(entries, by_layer, strict=True)
                for key, style in merged.items()
                if any(tensor.startswith(f"{key}.") or tensor == key for tensor in inside)
            ):
                tensor |= {f"layers.*.{name}.{key}": style for key, style in merged.items()}
                break
    assert body.embedding is not None
    is_single = [node.name for node in body.nodes] == [body.embedding.name, body.stack.name]
    plain = not body.embedding.config.after_table() and not stack.wired and stack.streams is None
    pipeline = is_single and plain and not stack.repeated
    return ParallelPlan(tuple(tensor.items()), pipeline, tuple(experts.items()))


def experts_of(ffn: nn.Module) -> nn.Module | None:
    """Return the `experts` of an FFN that can be divided; None if there are none.

    Their number is `num_experts`, and each of their tensors is a stack of this size. `forward` takes tokens, ids
    [tokens, any number] and weights, and reads `num_experts`.
    """
    experts = getattr(ffn, "experts", None)
    count = getattr(experts, "num_experts", None)
    if not (isinstance(experts, nn.Module) and isinstance(count, int)):
        return None
    layers = [child for child in experts.children() if isinstance(child, StackedLinear)]
    stacked = [tensor for layer in layers for tensor in layer.state_dict().values()]
    are_all = len(stacked) == len(experts.state_dict()) and all(tensor.size(0) == count for tensor in stacked)
    return experts if are_all else None


def _by_expert(tensors: Mapping[str, Tensor]) -> Entries:
    """Return the entries that divide the experts of an FFN, whose tensors have these names."""
    weights = [name for name in tensors if name.startswith("experts.")]
    layers = {name.rpartition(".")[0]: LOCAL for name in weights}
    return {**dict.fromkeys(weights, EXPERT), **layers, "experts": DISPATCH}


def _step_tensors(prefix: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _entries(step: Step, role: str, tensors: Mapping[str, Tensor], *, divided: bool) -> Entries:
    """Return the entries of a sublayer, whose tensors have these names."""
    if role == "attention":
        return _attention_entries(step, tensors, divided=divided)
    experts: Entries = {}
    if any(name.startswith("experts.") for name in tensors):
        weights = {f"experts.{name}.weight": style for name, style in EXPERTS.items()}
        if divided and not any(name.startswith("experts.") and name not in weights for name in tensors):
            experts = {name: style for name, style in weights.items() if name in tensors}
            experts |= {name.removesuffix(".weight"): "local_params" for name in experts}
            experts["experts"] = "moe_tp_experts"
        return experts | _dense_entries("shared_expert.", tensors, divided=divided)
    return _dense_entries("", tensors, divided=divided)


def _dense_entries(prefix: str, tensors: Mapping[str, Tensor], *, divided: bool) -> Entries:
    """Return the entries of an FFN, whose hidden units must be independent."""
    modules = _modules_of(_step_tensors(prefix, tensors))
    if not {"up_proj", OUTPUTS["ffn"]} <= modules:
        return {}
    into, out = DIVIDED if divided and modules <= {"gate_proj", "up_proj", OUTPUTS["ffn"]} else GATHERED
    entries = {f"{prefix}{name}": into for name in ("gate_proj", "up_proj") if name in modules}
    return entries | {f"{prefix}{OUTPUTS['ffn']}": out}


def _modules_of(tensors: Mapping[str, Tensor]) -> set[str]:
    return {re.sub(r"\.(weight|bias)$", "", name) for name in tensors}


def _attention_entries(step: Step, tensors: Mapping[str, Tensor], *, divided: bool) -> Entries:
    """Return the entries of an attention, whose heads must be independent."""
    config, out, modules = step.config, OUTPUTS["attention"], _modules_of(tensors)
    into = ("q_proj", "k_proj", "v_proj")
    if not {*into, out} <= modules or not isinstance(config, AttentionConfig):
        return {}
    norms = [name for name in modules - {*into, out} if name.count(".") == 0 and "norm" in name]
    same = all(tensors[f"{name}.weight"].shape == (config.head_width,) for name in norms)
    separate = len(norms) + 4 == len(modules) and same and config.kv_heads > 1
    # The biases of scores have a row for each head, which no process would divide.
    if divided and separate and config.score_bias is None and config.content_scores is None:
        return {**dict.fromkeys(into, DIVIDED[0]), out: DIVIDED[1], **dict.fromkeys(sorted(norms), NORM)}
    return {**dict.fromkeys(into, GATHERED[0]), out: GATHERED[1]}

"""The names of a decoder's modules as in transformers' Llama and the families around it.

Adapters, quantization configs and plans of published models choose modules by these names: `self_attn.q_proj`,
`mlp.down_proj`, `input_layernorm`. A fused projection gets a name for each of its parts. An attention or an FFN of a
plugin takes the names where its projections play these parts: a projection to queries, keys or values by its name, the
projection to the residual stream by its `residual`. Any other module keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from tfkit.component import Step
from tfkit.graph.expand import Graph, Node
from tfkit.nn import Linear, StackedLinear

PROJECTIONS = {"q": "q_proj", "k": "k_proj", "v": "v_proj", "gate": "gate_proj", "up": "up_proj"}
"""Names of projections, by what they compute."""
SPELLINGS = {"query": "q", "queries": "q", "key": "k", "keys": "k", "value": "v", "values": "v"}
"""Further names that plugins give to projections."""
OUTPUTS = {"attention": "o_proj", "ffn": "down_proj"}
"""Names of the projections to the residual stream, by sublayer."""
SUBLAYERS = {"attention": "self_attn", "ffn": "mlp"}
EXPERTS = {"router": "gate", "shared": "shared_expert", "shared_gate": "shared_expert_gate"}
"""Names of the modules next to the `experts` of a mixture."""


@dataclass(frozen=True)
class LlamaNames:
    """The names of the modules in a decoder's body.

    A module whose path is the path of the module around it is dissolved: its children belong to that module.
    """

    paths: Mapping[str, str]
    """Paths in the folder of all modules whose names differ, and of the modules in them, by their paths in the model.
    A fused projection has a path for each of its parts."""
    unnamed: tuple[str, ...]
    """The sublayers that have other projections, which keep their names."""

    @classmethod
    def of(cls, model: nn.Module, graph: Graph) -> LlamaNames:
        """Return the names of a built model. Its body has a single stack."""
        paths: dict[str, str] = {}
        unnamed: dict[str, None] = {}
        for node in graph.nodes:
            if node.module != node.name:
                continue
            module = model.get_submodule(node.name)
            if node.stack is not None:
                unnamed |= dict.fromkeys(_name_stack(node, module, paths))
            elif node.config.table() is not None:
                paths[node.name] = ""
                for name, _ in module.named_children():
                    paths[f"{node.name}.{name}"] = "embed_tokens" if name == "tokens" else f"embed_{name}"
        return cls(paths, tuple(unnamed))

    def __call__(self, name: str) -> str:
        """Return the name of a module or a tensor in the folder, without the name of the body."""
        words = name.split(".")
        for count in range(len(words), 0, -1):
            path = self.paths.get(".".join(words[:count]))
            if path is not None:
                return ".".join([*[path] * bool(path), *words[count:]])
        return name

    def parts_of(self, path: str, module: nn.Module) -> list[str]:
        """Return the paths of a fused projection's parts in the model; empty if it is not divided."""
        around = path.rpartition(".")[0]
        parts = getattr(module, "parts", None) or {}
        paths = [f"{around}.{part}" if around else part for part in parts]
        return paths if isinstance(module, Linear) and all(path in self.paths for path in paths) else []


def _name_stack(node: Node, module: nn.Module, paths: dict[str, str]) -> Iterator[str]:
    """Set the names of a stack's modules, and yield the sublayers that keep the names of their projections."""
    assert node.stack is not None
    paths[node.name] = ""
    paths[f"{node.name}.final_norm"] = "norm"
    for index, layer in enumerate(node.stack.layers):
        children = dict(module.get_submodule(f"layers.{index}").named_children())
        steps = {step.name: step for step in layer.steps}
        names = {name: new for name, new in _layer_names(layer.steps) if name in children}
        for name, child in children.items():
            path, new = f"{node.name}.layers.{index}.{name}", names.get(name, name)
            if [*names.values(), *children.keys() - names.keys()].count(new) > 1:  # norms before and after a sum
                new = name
            paths[path] = f"layers.{index}.{new}"
            step = steps.get(name)
            if step is None:
                continue
            if step.role not in SUBLAYERS:
                yield f"`{step.role}`"
            elif not _name_projections(child, step, path, paths[path], paths):
                yield f"`{step.role}` of kind `{step.config.kind_name()}`"


def _layer_names(steps: Sequence[Step]) -> Iterator[tuple[str, str]]:
    """Yield the names of a layer's sublayers and norms, each with its name in Llama, Gemma or OLMo."""
    yield "input_norm", "input_layernorm"
    has_out = any(step.norm_out is not None or step.norm_after is not None for step in steps)
    for step in steps:
        number = step.name.removeprefix(step.role)  # `attention_2` is the second attention
        yield step.name, SUBLAYERS.get(step.role, step.role) + number
        if step.role not in SUBLAYERS or number:
            continue
        is_ffn = step.role == "ffn"
        before = "pre_feedforward_layernorm" if has_out else "post_attention_layernorm"
        after = "post_feedforward_layernorm" if is_ffn else "post_attention_layernorm"
        yield f"{step.name}_norm_in", before if is_ffn else "input_layernorm"
        yield f"{step.name}_norm_{'after' if step.norm_out is None else 'out'}", after


def _name_projections(module: nn.Module, step: Step, path: str, new: str, paths: dict[str, str]) -> bool:
    """Set the names of the projections in an attention or an FFN. Return True if all parts of Llama's exist."""
    children, role = dict(module.named_children()), step.role
    names: set[str] = set()
    if (project := children.get("project")) is not None and role == "attention":
        inner = dict(project.named_children())
        if not inner.keys() & children.keys() and not list(project.parameters(recurse=False)):
            paths[f"{path}.project"] = new
            names |= _name_children(inner, role, f"{path}.project", new, paths)
    if "experts" in children:
        for name, child in children.items():
            paths[f"{path}.{name}"] = below = f"{new}.{EXPERTS.get(name, name)}"
            if name in ("experts", "shared"):
                names |= _name_children(dict(child.named_children()), role, f"{path}.{name}", below, paths)
    else:
        names |= _name_children(children, role, path, new, paths)
    if role == "ffn":
        return OUTPUTS[role] in names and not names.isdisjoint({"up_proj", "gate_up_proj"})
    further = {"k_proj"} if getattr(step.config, "values", None) == "keys" else {"k_proj", "v_proj"}
    return names >= {"q_proj", OUTPUTS[role]} | (set() if step.takes else further)


def _name_children(
    children: Mapping[str, nn.Module], role: str, path: str, new: str, paths: dict[str, str]
) -> set[str]:
    """Set the names of the projections among these modules, and return the names."""
    names: set[str] = set()
    linear = {name: child for name, child in children.items() if isinstance(child, nn.Linear | StackedLinear)}
    inputs = [name for name, child in linear.items() if not getattr(child, "residual", False)]
    for name, child in linear.items():
        parts: Mapping[str, int] = getattr(child, "parts", None) or {}
        named = {part: projection for part in parts if (projection := _projection(part, role)) is not None}
        if len(named) == len(parts) > 0 and isinstance(child, Linear):
            paths |= {f"{path}.{part}": f"{new}.{projection}" for part, projection in named.items()}
            names |= {*named.values()}
            continue
        projection = OUTPUTS[role] if getattr(child, "residual", False) else _projection(name, role)
        if isinstance(child, StackedLinear) and parts:
            projection = f"{name.removesuffix('_proj')}_proj"
        elif projection is None and role == "ffn" and inputs == [name]:
            projection = "up_proj"
        if projection is not None and projection not in names and (projection == name or projection not in children):
            paths[f"{path}.{name}"] = f"{new}.{projection}"
            names.add(projection)
    return names


def _projection(name: str, role: str) -> str | None:
    """Return the name in Llama of a projection that a component calls `name`; None for any other projection."""
    word = re.sub(r"_proj(ection)?$", "", name)
    word = SPELLINGS.get(word, word)
    is_role = (word in ("gate", "up")) == (role == "ffn")
    return PROJECTIONS.get(word) if is_role else None

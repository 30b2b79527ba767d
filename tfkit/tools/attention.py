"""What the queries of a model read: the attention weights of every layer and head."""

from __future__ import annotations

from collections import Counter
from functools import partial

import torch
from torch import Tensor, fx, nn

from tfkit.arguments import checked
from tfkit.builder import assemble, graph_of
from tfkit.model import BuiltModel
from tfkit.nn import Softmax
from tfkit.wrapped import whole


@checked
def attention_weights(model: BuiltModel, /, *inputs: Tensor, **named: Tensor | None) -> dict[str, Tensor]:
    """The weights with which each query reads each key, in one forward without dropout and gradients.

    The model may have been built with any attention backend; it is left as it is. Its weights are used where they lie,
    by a second model whose attention is written out.

    Args:
        model: what `tfkit.build` returned, or a wrapper that leaves its parameters as they are.
        inputs: what the model's forward takes, in order.
        named: the same by name, padding masks among it.

    Returns:
        By the name of each attention, such as `decoder.layers.0.attention`, [batch, heads, queries, keys]; in the order
        in which they run. Rows sum to one, and are zero for queries that may read no key. An attention that runs
        several times, in layers that share weights, has an entry for each, `encoder.layers.0.attention[0]` and so on.
        Attention from a plugin is there if it takes its softmax from `tfkit.nn.Softmax`.

    Raises:
        ValueError: the model was not built by `tfkit.build`, its modules were changed since, or none of its attentions
            shows its weights.
    """
    model = whole(model)
    graph = graph_of(model)
    with torch.device("meta"):
        twin = assemble(graph, attention_backend="eager").eval()
    tensors = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers(remove_duplicate=False))
    if tensors.keys() != {name for name, _ in (*twin.named_parameters(), *twin.named_buffers())}:
        raise ValueError(f"`{graph.name}` has other parameters than when it was built: its modules were changed")
    names = _names(twin)
    if not names:
        raise ValueError(f"`{graph.name}` has no attention that shows its weights")
    runs: list[tuple[str, Tensor]] = []
    for path, name in names.items():
        twin.get_submodule(path).register_forward_hook(partial(_record, runs, name))
    with torch.no_grad():
        torch.func.functional_call(twin, tensors, inputs, named)
    return _numbered(runs)


def _names(model: fx.GraphModule) -> dict[str, str]:
    """The path of each softmax inside an attention, and the attention's; its own where the attention has several."""
    attentions = [path for path, config in model.meta["components"].items() if config.slot == "attention"]
    owners: dict[str, str] = {}
    for path, module in model.named_modules():
        around = [one for one in attentions if path.startswith(f"{one}.")]
        if isinstance(module, Softmax) and around:
            owners[path] = max(around, key=len)
    counts = Counter(owners.values())
    return {path: owner if counts[owner] == 1 else path for path, owner in owners.items()}


def _record(runs: list[tuple[str, Tensor]], name: str, _module: nn.Module, _args: object, weights: Tensor) -> None:
    runs.append((name, weights))


def _numbered(runs: list[tuple[str, Tensor]]) -> dict[str, Tensor]:
    total, seen = Counter(name for name, _ in runs), Counter[str]()
    found: dict[str, Tensor] = {}
    for name, weights in runs:
        found[name if total[name] == 1 else f"{name}[{seen[name]}]"] = weights
        seen[name] += 1
    return found

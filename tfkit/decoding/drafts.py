"""Speculative decoding with the further outputs of a model: https://arxiv.org/abs/2211.17192.

An output drafts one token, the likeliest. The acceptance rule for such a draft is simple: choose a token from the
distribution of the model, and accept the draft if it is this token. Therefore the generated tokens equal the tokens of
decoding without drafts, for greedy decoding and for sampling.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tfkit.building.model import BuiltModel
from tfkit.decoding.cached import CachedModel, check_rewinds
from tfkit.errors import listing
from tfkit.graph.decode_split import reached_names, reduce_to_output, split_for_decoding, wire_of
from tfkit.graph.expand import Graph, as_list


class Drafts:
    """A model that predicts several tokens per forward: its main output, and an output for each later token.

    The first of `names` drafts the token after the next, the second the token after that. Inputs of the model besides
    its tokens are the tokens ahead of each position, in the order of the spec: the next token, the token after it.

    All rows of a batch accept the same number of drafts, so the caches of all rows have equal lengths.

    Raises:
        ValueError: a name is not a further output of logits, an output needs a sequence that drafting does not have, or
            a cache cannot go back to an earlier token.
    """

    def __init__(self, model: BuiltModel, graph: Graph, output: str, names: Sequence[str], length: int) -> None:
        self.forwards = 1
        main = reduce_to_output(graph, output)
        nodes = {node.name: node for node in graph.nodes}
        base = reached_names([output], nodes, static=True)
        parts = [_draft_graph(graph, output, name, base) for name in names]
        sources = dict.fromkeys(name for part in parts for name in part.inputs if name in nodes)
        if not sources:
            raise ValueError(f"`{names[0]}` cannot draft: it depends on no hidden state of `{output}`")
        self._tokens_input = split_for_decoding(main).step_inputs[0]
        self.cached = CachedModel.of_graph(model, replace(main, outputs=(output, *sources)), length)
        self._sources = list(sources)
        self._ahead = [name for name in graph.inputs if name not in base]
        self._graphs = parts
        self._heads = [CachedModel.of_graph(model, part, length) for part in parts]
        for cached in (self.cached, *self._heads):
            check_rewinds(cached)
        for number, (name, part) in enumerate(zip(names, parts, strict=True), start=1):
            later = [source for source in part.inputs if source in self._ahead[number:]]
            if later:
                raise ValueError(f"`{name}` takes `{later[0]}`, tokens that are not drafted before it")

    def read(self, result: Any) -> Tensor:
        """Store the hidden states of a forward, a tuple of logits and hidden states; return the logits."""
        logits: Tensor = result[0]
        self._new: list[Tensor] = list(result[1:])
        return logits

    def start(self, prompt: Tensor, mask: Tensor | None, n_samples: int) -> None:
        """Begin to draft after the prompts [b, t], whose forward has been read."""
        self._tokens = prompt
        self._mask = torch.ones_like(prompt, dtype=torch.bool) if mask is None else mask
        self._padded = mask is not None
        self._hidden = [x.repeat_interleave(n_samples, dim=0) for x in self._new]
        self._first = 0
        for head in self._heads:
            head.start(prompt.size(0))

    def accept(self, tokens: Tensor) -> None:
        """Append the chosen tokens [b]."""
        self._tokens = torch.cat((self._tokens, tokens[:, None]), dim=1)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=True)

    def reject(self, n: int) -> None:
        """Remove the last n drafts from the caches and the hidden states."""
        self.cached.rewind(n)
        self._hidden = [x[:, : x.size(1) - n] for x in self._hidden]

    def verify(self, limit: int) -> tuple[list[Tensor], list[Tensor]]:
        """Draft at most `limit` tokens; return them, and the logits after the last chosen token and each draft."""
        drafts = self._draft(min(limit, len(self._heads)))
        piece = torch.cat((self._tokens[:, -1:], *(draft[:, None] for draft in drafts)), dim=1)
        logits = self.read(self.cached(piece))
        self.forwards += 1
        self._hidden = [torch.cat((x, new), dim=1) for x, new in zip(self._hidden, self._new, strict=True)]
        return drafts, list(logits.unbind(dim=1))

    def _draft(self, count: int) -> list[Tensor]:
        """Draft tokens. A head reads again the positions that it has read with drafts as the tokens ahead."""
        n, tokens, drafts = self.cached.used, self._tokens, list[Tensor]()
        for number, (head, graph) in enumerate(zip(self._heads[:count], self._graphs, strict=False), start=1):
            used = head.used
            hidden = dict(zip(self._sources, self._hidden, strict=True))
            values = {name: x[:, used - self._first :] for name, x in hidden.items() if name in graph.inputs}
            if self._tokens_input in graph.inputs:
                values[self._tokens_input] = tokens[:, used:n]
            for distance, name in enumerate(self._ahead, start=1):
                if name in graph.inputs:
                    values[name] = tokens[:, used + distance : n + distance]
            first = head.step_inputs[0]
            mask = self._mask[:, used:n] if self._padded else None
            further = {name: value for name, value in values.items() if name != first}
            draft = head(values[first], mask, keep=1, **further)[:, -1].argmax(dim=-1)
            again = min(number - 1, head.used)
            head.rewind(again, self._mask[:, n - again : n])
            drafts.append(draft)
            tokens = torch.cat((tokens, draft[:, None]), dim=1)
        first_needed = min(head.used for head in self._heads)
        self._hidden = [x[:, first_needed - self._first :] for x in self._hidden]
        self._first = first_needed
        return drafts


def _draft_graph(graph: Graph, output: str, name: str, base: dict[str, None]) -> Graph:
    """Return the graph of the nodes that only a drafting output needs; values of the remaining nodes are its inputs."""
    nodes = {node.name: node for node in graph.nodes}
    if name not in graph.outputs or name == output:
        further = [item for item in graph.outputs if item != output]
        raise ValueError(
            f"`drafts` must be further outputs of `{graph.name}`, {listing(further) or 'which has none'}; got `{name}`"
        )
    if nodes[name].output.type != "logits":
        raise ValueError(f"`{name}` returns {nodes[name].output.in_words()}, but tokens are drafted from logits")
    needed = reached_names([name], nodes, static=True)
    alone = [node for node in needed if node in nodes and node not in base]
    sources = dict.fromkeys(
        source
        for node in alone
        for field, wires in nodes[node].wires.items()
        if wire_of(nodes[node], field).value == "output"
        for source in as_list(wires)
        if source not in alone
    )
    inputs = {source: nodes[source].output if source in nodes else graph.inputs[source] for source in sources}
    remaining = tuple(node for node in graph.nodes if node.name not in inputs)
    part = replace(graph, inputs=inputs, nodes=remaining, outputs=(name,))
    if initial := split_for_decoding(part).initial_inputs:
        raise ValueError(f"`{name}` cannot draft: it takes the full sequence `{initial[0]}`")
    return part

"""Absurd specs are rejected in less than a second, whatever is absurd; and names that modules need."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import pytest
import torch

import tfkit

from ..sampling import some
from ..time_limit import cheaply

PLUGINS = tfkit.load_plugins(entry_points=False)
HEAD = "tfkit: 1\nname: m\nd_model: 32\nvocab_size: 100\n"
EMBEDDING = "  e: {block: embedding}\n"


def stack(keys: str) -> str:
    return f"{HEAD}graph:\n{EMBEDDING}  d: {{block: decoder, attention: {{kind: mha, n_heads: 4}}, {keys}}}\n"


def nodes(lines: Iterable[str]) -> str:
    return HEAD + "graph:\n" + EMBEDDING + "".join(f"  {line}\n" for line in lines)


def layers(pattern: str) -> str:
    return stack(f"n_layers: 4096, layers: {{variants: {{local: {{dropout: 0.1}}}}, pattern: {pattern}}}")


def chain() -> str:
    """Each shared key is a sum of the next, many times over."""
    keys = ["d_model", "vocab_size", "max_len", "dropout", "bias", "norm"]
    sums = [f"{key}: {'+'.join([next] * (190 // (len(next) + 1)))}" for key, next in pairwise(keys)]
    return "\n".join(["tfkit: 1", "name: m", *sums, "norm: 1", "graph: {e: {block: embedding}}"])


ABSURD = {
    "layers": (stack("n_layers: 1000000000"), "`n_layers` must be an integer from 1 to 4,096"),
    "power": (stack("n_layers: 2, ffn: {kind: gelu, d_ff: 9**9**9}"), "`d_ff`: a power of more than 64"),
    "product": (stack(f"n_layers: 2, ffn: {{kind: gelu, d_ff: {'9**63*' * 25}1}}"), "`d_ff`: a number larger"),
    "long_expression": (stack(f"n_layers: {'1+' * 200_000}1"), "`n_layers`: an expression has at most 200"),
    "chain_of_sums": (chain(), "`dropout` must be a number"),
    "nodes": (nodes(f"n{i}: {{block: norm}}" for i in range(100_000)), "more than 50,000 keys and values"),
    "small_nodes": (nodes(f"n{i}: norm" for i in range(24_000)), "`graph` must have at most"),
    "unknown_nodes": (nodes(f"n{i}: {{block: norm, input: m{i}}}" for i in range(900)), "unknown node `m0`"),
    "circle": (nodes(f"n{i}: {{block: norm, input: n{(i + 1) % 900}}}" for i in range(900)), "the graph has a cycle"),
    "wrong_keys": (stack(", ".join(f"n_layer{i}: 2" for i in range(20_000))), "unknown key `n_layer0`"),
    "braces": (HEAD + "graph: " + "{a: " * 10_000, "nested more than 40"),
    "count_in_a_pattern": (
        layers("[local*9999]"),
        "the pattern must have at most 4096 layers, as many as the stack; got 9999",
    ),
    "long_pattern": (layers(f"[{'local*9999, ' * 4000}]"), "the pattern must have at most"),
    "longer_pattern": (layers(f"[{'local, ' * 20_000}]"), "`pattern` must have at most"),
    "ranges": (layers(f"{{{', '.join(f'0-{i}: local' for i in range(4000))}}}"), "layer 0 is in the pattern twice"),
    "variants": (
        stack(f"n_layers: 9, layers: {{variants: {{{', '.join(f'v{i}: {{}}' for i in range(20_000))}}}}}"),
        "`variants` must have at most 100",
    ),
    "sublayers": (stack(f"n_layers: 2, sublayers: [{'attention, ' * 20_000}]"), "`sublayers` must have at most"),
    "summands": (nodes([f"s: {{block: add, inputs: [{'e, ' * 40_000}]}}"]), "`inputs` must have at most"),
    "long_name": (HEAD + f"graph: {{e: {{block: {'e' * 500_000}}}}}", "unknown block `eeee"),
}


@pytest.mark.parametrize("name", some(ABSURD, 3))
def test_absurd_specs_are_refused_quickly(name: str) -> None:
    text, message = ABSURD[name]
    with cheaply():
        with pytest.raises(tfkit.SpecError) as caught:
            tfkit.loads(text, plugins=PLUGINS)
        rendered = str(caught.value)
    assert any(diagnostic.message.startswith(message) for diagnostic in caught.value.diagnostics)
    assert len(caught.value.diagnostics) <= 51
    assert max(map(len, rendered.split("\n"))) <= 140


@pytest.mark.slow
def test_a_long_chain_is_fine_in_either_direction() -> None:
    forward = [f"n{i}: {{block: norm, input: {f'n{i - 1}' if i else 'e'}}}" for i in range(900)]
    for lines in (forward, forward[::-1]):
        graph = tfkit.loads(nodes(lines) + "outputs: [n899]\n", plugins=PLUGINS)
        assert [node.name for node in graph.nodes] == ["e", *(f"n{i}" for i in range(900))]


def test_no_node_has_the_name_of_something_that_modules_have() -> None:
    module = tfkit.build(tfkit.loads(nodes([]), plugins=PLUGINS), device="meta")
    assert isinstance(module, torch.fx.GraphModule)
    # transformers, once another test has imported it, adds `smart_apply` to every module.
    handled = {name for name in dir(module) if not name.startswith("_")} - {"e", "smart_apply"}
    for name in sorted(handled):
        with pytest.raises(tfkit.SpecError, match="cannot be the name of a node"):
            tfkit.loads(nodes([f"{name}: norm"]), plugins=PLUGINS)


@pytest.mark.parametrize("name", ["x", "image", "positions"])
def test_the_names_of_the_spec_are_those_of_the_module(name: str) -> None:
    """The forward takes its inputs by the names of the spec, and the modules have those of the nodes."""
    text = f"{HEAD}inputs: [{name}]\ngraph: {{e: {{block: embedding}}, f: {{block: norm, input: e}}}}\n"
    model = tfkit.build(tfkit.loads(text, plugins=PLUGINS), device="meta")
    assert model(**{name: torch.zeros(1, 2, dtype=torch.long, device="meta")}).shape == (1, 2, 32)
    model = tfkit.build(tfkit.loads(nodes([f"{name}: norm"]), plugins=PLUGINS), device="meta")
    assert f"{name}.weight" in model.state_dict()

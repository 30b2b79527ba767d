"""`same: NODE`: nodes call the module of a node on their inputs, so its weights exist once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.spec.render import data_of
from tfkit.tools.draw.model_scene import scene_of

TWINS: dict[str, Any] = {
    "tfkit": 1,
    "name": "twins",
    "d_model": 8,
    "vocab_size": 23,
    "inputs": ["query", "document"],
    "outputs": ["query_vector", "document_vector"],
    "graph": {
        "query_embedding": {"block": "embedding", "input": "query"},
        "query_hidden": {"block": "linear", "d_model": 12, "activation": "gelu"},
        "query_vector": {"block": "pooler", "d_model": 12, "select": "mean"},
        "document_embedding": {"same": "query_embedding", "input": "document"},
        "document_hidden": {"same": "query_hidden"},
        "document_vector": {"same": "query_vector"},
    },
}
INPUTS = {
    "query": torch.tensor([[3, 11, 4], [7, 2, 22]]),
    "document": torch.tensor([[5, 1, 16, 9, 8], [6, 0, 12, 3, 3]]),
}


def twins(**nodes: Any) -> dict[str, Any]:
    return {**TWINS, "graph": {**TWINS["graph"], **nodes}}


class Tower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(23, 8)
        self.hidden = nn.Linear(8, 12)

    def forward(self, tokens: Tensor) -> Tensor:
        return F.gelu(self.hidden(self.table(tokens))).mean(dim=1)


def test_values_and_gradients_are_those_of_a_module_that_is_called_twice() -> None:
    model, tower = tfkit.build(twins(), seed=3), Tower()
    names = [name for name, _ in model.named_parameters()]
    weights = dict(zip(dict(tower.named_parameters()), model.parameters(), strict=True))
    tower.load_state_dict(weights)
    vectors = model(**INPUTS)
    expected = tower(INPUTS["query"]), tower(INPUTS["document"])
    assert [name.partition(".")[0] for name in names] == ["query_embedding", "query_hidden", "query_hidden"]
    for result in (vectors, expected):
        (result[0] * torch.arange(1, 13) - result[1].sin()).sum().backward()
    for value, reference in zip(vectors, expected, strict=True):
        torch.testing.assert_close(value, reference)
    for parameter, reference in zip(model.parameters(), tower.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, reference.grad)


def test_weights_exist_once() -> None:
    model = tfkit.build(twins())
    count = 23 * 8 + 8 * 12 + 12
    assert sum(value.numel() for value in model.state_dict().values()) == count
    assert not [path for path, _ in model.named_modules() if path.startswith("document")]
    assert not [path for path in model.meta["components"] if path.startswith("document")]
    counted = tfkit.count_params(model)
    assert counted.total == count
    assert "shared: document_hidden uses the weights of query_hidden, counted once" in counted.notes


def test_padding_of_each_call_is_its_own() -> None:
    model = tfkit.build(twins()).eval()
    mask = torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])
    _, vector = model(**INPUTS, document_mask=mask)
    _, alone = model(INPUTS["query"][1:], INPUTS["document"][1:, :2])
    torch.testing.assert_close(vector[1:], alone)


def test_a_trace_has_a_value_for_each_call() -> None:
    model = tfkit.build(twins()).eval()
    with tfkit.trace(model, read="query_vector") as values:
        outputs = model(**INPUTS)
    for value, output in zip(values["query_vector"], outputs, strict=True):
        assert torch.equal(value, output)
    with pytest.raises(ValueError, match=r"no value `document_vector`"), tfkit.trace(model, read="document_vector"):
        pass


def test_a_table_may_be_tied_to_either_node() -> None:
    head = {"block": "lm_head", "input": "document_embedding", "tie": "document_embedding"}
    spec = {**twins(logits=head), "outputs": ["query_vector", "document_vector", "logits"]}
    model = tfkit.build(spec).eval()
    logits = model(**INPUTS)[2]
    table = model.get_parameter("query_embedding.tokens.weight")
    torch.testing.assert_close(logits, F.embedding(INPUTS["document"], table) @ table.T)


def test_caches_belong_to_nodes() -> None:
    layer = {"norm": "rmsnorm", "attention": {"kind": "mha", "n_heads": 2}, "ffn": {"kind": "gelu", "d_ff": 12}}
    graph = {
        "embedding": "embedding",
        "first": {"block": "decoder", "n_layers": 2, **layer},
        "second": {"same": "first"},
        "logits": "lm_head",
    }
    model = tfkit.build({"tfkit": 1, "name": "loop", "d_model": 8, "vocab_size": 23, "graph": graph}).eval()
    tokens = INPUTS["document"]
    cached = tfkit.CachedModel(model, length=5)
    steps = [cached(tokens[:, :3]), cached(tokens[:, 3:4]), cached(tokens[:, 4:])]
    torch.testing.assert_close(torch.cat(steps, dim=1), model(tokens))


def test_a_spec_states_the_node_as_it_was_written() -> None:
    graph = tfkit.load(twins())
    assert data_of(graph.node("document_embedding").config) == {"same": "query_embedding", "input": "document"}
    assert graph.node("document_hidden").config.d_model == 12


def test_a_change_of_the_node_changes_each_call() -> None:
    model = tfkit.build(tfkit.load(twins(), sets=["query_hidden.d_model=5", "query_vector.d_model=5"]))
    assert [vector.shape for vector in model(**INPUTS)] == [(2, 5), (2, 5)]
    copies = tfkit.build(twins(document_hidden={"like": "query_hidden"}))
    assert len(copies.state_dict()) == 5


def test_a_drawing_shows_the_parameters_once() -> None:
    scene = scene_of(tfkit.load(twins()))
    assert sum(node.rest + sum(box.total for box in node.boxes()) for node in scene.nodes.values()) == scene.total
    assert not [wire for wire in scene.wires if wire.way == "side"]


@pytest.mark.parametrize(
    ("nodes", "path", "message", "help"),
    [
        (
            {"document_hidden": {"same": "query_hiden"}},
            "graph.document_hidden.same",
            "`same` must be the name of a node above; got `query_hiden`",
            "a node with a similar name exists: `query_hidden`",
        ),
        (
            {"document_hidden": {"same": "document_hidden"}},
            "graph.document_hidden.same",
            "`same` must be the name of a node above; got `document_hidden`",
            None,
        ),
        (
            {"query_hidden": {"same": "document_hidden"}},
            "graph.query_hidden.same",
            "`same` must be the name of a node above; got `document_hidden`",
            None,
        ),
        (
            {"third": {"same": "document_embedding", "input": "query"}},
            "graph.third.same",
            "`same` must be the name of a node without `same`; got `document_embedding`",
            "write `same: query_embedding`",
        ),
        (
            {"document_hidden": {"same": "query_hidden", "d_model": 7}},
            "graph.document_hidden.d_model",
            "`d_model` has no effect: `same: query_hidden` takes all values of `query_hidden`",
            "remove it, or write `like: query_hidden` for separate weights",
        ),
        (
            {"document_hidden": {"same": "query_hidden", "block": "linear"}},
            "graph.document_hidden.block",
            "`block` has no effect: `same: query_hidden` takes all values of `query_hidden`",
            "remove it, or write `like: query_hidden` for separate weights",
        ),
        (
            {"document_hidden": {"same": "query_hidden", "input": "query_hidden"}},
            "graph.document_hidden.input",
            "`input` must be as in `query_hidden`, a sequence of width 8; got a sequence of width 12",
            "write `like: query_hidden` for separate weights",
        ),
    ],
)
def test_errors(nodes: dict[str, Any], path: str, message: str, help: str | None) -> None:
    with pytest.raises(tfkit.SpecError) as raised:
        tfkit.load(twins(**nodes))
    errors = {error.path: error for error in raised.value.diagnostics}
    assert errors[path].message == message
    assert errors[path].help == help


def test_the_first_use_must_have_an_effect() -> None:
    spec = {**twins(), "outputs": ["document_vector"]}
    with pytest.raises(tfkit.SpecError, match="`query_vector` has no effect: no node uses its output"):
        tfkit.load(spec)

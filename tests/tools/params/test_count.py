from __future__ import annotations

import pytest

import tfkit
from tfkit.tools.params.count import By, count_params


def rows(graph: tfkit.Graph, by: By = "component") -> dict[str, int]:
    return {row.name: row.parameters for row in count_params(graph, by).rows}


def test_components_by_hand(small: tfkit.Graph) -> None:
    assert rows(small) == {
        "embedding": 50 * 16,
        "position": 8 * 16,
        "attention": 2 * (4 * 16 * 16 + 4 * 16),
        "ffn": 2 * (2 * 16 * 32 + 32 + 16),
        "norm": 5 * 2 * 16,
    }
    count = count_params(small)
    assert count.total - count.non_embedding == 58 * 16
    assert count.notes == ("tied: logits uses the table of embedding, 800 counted once",)


@pytest.mark.parametrize("by", ["component", "node", "layer", "module"])
@pytest.mark.parametrize("name", ["gpt2", "t5_small", "bert_base", "block_512"])
def test_rows_add_up(name: str, by: By) -> None:
    graph = tfkit.load(name)
    count = count_params(graph, by)
    assert sum(row.parameters for row in count.rows) == count.total
    assert sum(row.non_embedding for row in count.rows) == count.non_embedding
    assert count.total == sum(parameter.numel() for parameter in tfkit.build(graph, device="meta").parameters())


def test_cross_attention_stands_apart() -> None:
    actual = rows(tfkit.load("vaswani_base"))
    assert actual["attention"] == 2 * actual["cross_attention"]
    assert list(actual) == ["embedding", "attention", "cross_attention", "ffn", "norm"]


def test_an_untied_head_is_a_row_and_no_embedding() -> None:
    count = count_params(tfkit.load("llama3_8b"))
    assert count.rows[-1].name == "head"
    assert count.rows[-1].parameters == count.rows[-1].non_embedding == 4096 * 128256
    assert [row.label for row in count.rows] == ["embedding", "attention", "FFN", "RMSNorm", "head"]


def test_relative_positions_are_positions_and_no_embedding() -> None:
    (row,) = [row for row in count_params(tfkit.load("t5_small")).rows if row.name == "position"]
    assert row.parameters == row.non_embedding == 2 * 32 * 8


def test_shared_layers_are_counted_once(small: tfkit.Graph) -> None:
    text = """
      tfkit: 1
      name: shared
      d_model: 16
      inputs: {x: {type: features, width: 16}}
      graph:
        encoder: {block: encoder, n_layers: 6, attention: {n_heads: 2}, layers: {groups: 2}}
    """
    count = count_params(tfkit.loads(text), "layer")
    assert [row.name for row in count.rows] == ["encoder.layers.0", "encoder.layers.1", "encoder.final_norm"]
    assert count.notes == ("shared: encoder runs 6 layers with the weights of 2, counted once",)

"""The ratio of heads of ConvBERT: read as the class of transformers reads it, written, and rejected."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import ConvBertConfig
from transformers.models.convbert.modeling_convbert import ConvBertSelfAttention

import tfkit

PLUGINS = tfkit.load_plugins(plugin_dirs=[Path(__file__).parents[1]], entry_points=False)


SMALL_CONFIG = {
    "model_type": "convbert",
    "hidden_size": 48,
    "num_hidden_layers": 1,
    "intermediate_size": 8,
    "vocab_size": 11,
}


def imported(folder: Path, **fields: object) -> tfkit.Graph:
    (folder / "config.json").write_text(json.dumps({**SMALL_CONFIG, **fields}))
    return tfkit.import_config(folder, plugins=PLUGINS).graph


@pytest.mark.parametrize(("heads", "ratio"), [(12, 2), (7, 2), (3, 4), (6, 1)])
def test_heads_are_those_of_the_class(heads: int, ratio: int, tmp_path: Path) -> None:
    fields = {"num_attention_heads": heads, "head_ratio": ratio}
    with torch.device("meta"):
        theirs = ConvBertSelfAttention(ConvBertConfig(hidden_size=48, **fields))
    graph = imported(tmp_path, **fields)
    attention = graph.spec.model.graph["encoder"].attention
    assert (attention.n_heads, attention.head_width) == (theirs.num_attention_heads, theirs.attention_head_size)
    tfkit.save(tfkit.build(graph), tmp_path / "back", layout="huggingface")
    written = json.loads((tmp_path / "back/config.json").read_text())
    assert (written["num_attention_heads"], written["head_ratio"]) == (2 * theirs.num_attention_heads, 2)


@pytest.mark.parametrize(("field", "value"), [("head_ratio", 0), ("head_ratio", 1.5), ("num_attention_heads", -2)])
def test_a_ratio_that_is_not_positive_is_rejected(field: str, value: float, tmp_path: Path) -> None:
    with pytest.raises(tfkit.SpecError, match=f"`{field}` must be a positive integer; got `{value}`"):
        imported(tmp_path, **{field: value})

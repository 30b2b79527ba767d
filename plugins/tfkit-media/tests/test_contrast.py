"""Two towers: a run learns to match images and texts."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from tfkit_media.shapes import draw
from torch import Tensor
from torch.nn.functional import cosine_similarity, cross_entropy

import tfkit
import tfkit.testing
from tfkit.cli import main

from .models import PLUGINS

TOWERS: dict[str, Any] = {
    "name": "towers",
    "requires": ["tfkit-media"],
    "d_model": 32,
    "vocab_size": 13,
    "max_len": 4,
    "inputs": {"tokens": "tokens", "image": {"type": "image", "channels": 1, "height": 16, "width": 16}},
    "graph": {
        "patches": {"block": "patches", "input": "image", "size": 4},
        "image_encoder": {
            "block": "encoder",
            "n_layers": 2,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "gelu", "d_ff": 64},
        },
        "image_vector": "pooler",
        "embedding": {"block": "embedding", "input": "tokens", "position": "learned"},
        "text_encoder": {
            "block": "encoder",
            "n_layers": 1,
            "attention": {"kind": "mha", "n_heads": 4},
            "ffn": {"kind": "gelu", "d_ff": 64},
        },
        "text_vector": {"block": "pooler", "select": "last"},
        "logits": {"block": "contrast", "inputs": ["image_vector", "text_vector"]},
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("form", ["softmax", "sigmoid"])
def test_a_run_learns_to_match(form: str, tmp_path: Path) -> None:
    (tmp_path / "shapes").mkdir()
    for name, array in draw(3000).items():
        np.save(tmp_path / f"shapes/{name}.npy", array)
    run: dict[str, Any] = {
        "tfkit": 1,
        "name": "pairs",
        "model": TOWERS,
        "data": {"kind": "image_pairs", "images": "shapes/images.npy", "tokens": "shapes/captions.npy"},
        "batch": {"sequences": 32},
        "steps": 300,
        "loss": {"kind": "contrastive", "form": form},
        "optimizer": {"kind": "adamw", "lr": 2e-3},
        "eval": {"every": 300, "metrics": ["matches"], "splits": {"val": "all"}},
    }
    if form == "sigmoid":
        run["model"] = {**TOWERS, "graph": {**TOWERS["graph"], "logits": {**TOWERS["graph"]["logits"], "bias": -4.0}}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(run, sort_keys=False), encoding="utf-8")
    plugins = ["--plugin-dir", str(Path(__file__).parents[1]), "--no-plugins"]
    assert main(["train", str(tmp_path / "run.yaml"), "-o", str(tmp_path / "out"), *plugins]) == 0
    lines = map(json.loads, (tmp_path / "out/metrics.jsonl").read_text(encoding="utf-8").splitlines())
    matches = [line["val.matches"] for line in lines if "val.matches" in line]
    assert matches[0] < 0.15
    assert matches[-1] > 0.3  # chance is 1 of 32


# ---- late interaction ----

TOKENS: dict[str, Any] = {
    "tfkit": 1,
    "name": "tokens",
    "requires": ["tfkit-media"],
    "d_model": 8,
    "vocab_size": 13,
    "inputs": ["query", "document"],
    "outputs": ["scores"],
    "graph": {
        "queries": {"block": "embedding", "input": "query"},
        "documents": {"same": "queries", "input": "document"},
        "scores": {"block": "late_interaction", "inputs": ["queries", "documents"]},
    },
}
QUERIES, DOCUMENTS = torch.arange(9).view(3, 3), torch.arange(12).flip(0).view(3, 4) * 3 % 13
LENGTHS = {"query": [3, 1, 2], "document": [4, 2, 3]}


def masked(name: str, length: int) -> Tensor:
    return torch.arange(length) < torch.tensor(LENGTHS[name])[:, None]


@pytest.mark.parametrize("padded", [False, True])
def test_scores_and_losses_are_those_of_a_loop(padded: bool) -> None:
    model = tfkit.build(tfkit.load(TOKENS, plugins=PLUGINS), seed=1)
    masks = {"query_mask": masked("query", 3), "document_mask": masked("document", 4)} if padded else {}
    table = model.queries.tokens.weight
    scores = torch.zeros(3, 3)
    for i, j in product(range(3), range(3)):
        query = QUERIES[i, : LENGTHS["query"][i] if padded else 3]
        document = DOCUMENTS[j, : LENGTHS["document"][j] if padded else 4]
        for token in query.tolist():
            scores[i, j] += max(cosine_similarity(table[token], table[other], dim=0) for other in document.tolist())
    torch.testing.assert_close(model(query=QUERIES, document=DOCUMENTS, **masks), scores)
    inputs = {"query": QUERIES, "document": DOCUMENTS, **masks}
    kind = PLUGINS.registry.find("loss", "contrastive")
    assert kind is not None
    loss = kind.config(symmetric=False).build(model)(inputs, torch.arange(3))
    expected = cross_entropy(scores, torch.arange(3), reduction="sum")
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, table)[0], torch.autograd.grad(expected, table)[0])


def test_a_document_without_tokens_has_the_least_score() -> None:
    model = tfkit.build(tfkit.load(TOKENS, plugins=PLUGINS), seed=1)
    mask = masked("document", 4) & torch.tensor([[True], [True], [False]])
    scores = model(query=QUERIES, document=DOCUMENTS, document_mask=mask)
    torch.testing.assert_close(scores[:, 2], torch.full((3,), -3.0))


def test_its_properties_hold() -> None:
    tfkit.testing.check_model(tfkit.load(TOKENS, plugins=PLUGINS), only=("meaning",))


@pytest.mark.parametrize(
    ("node", "path", "message"),
    [
        ({"inputs": ["queries"]}, "graph.scores.inputs", "`inputs` must name two sequences; got 1"),
        ({"inputs": ["queries", "pooled"]}, "graph.scores.inputs.1", "`inputs` must be sequences of the same width"),
    ],
)
def test_other_inputs_are_an_error(node: dict[str, Any], path: str, message: str) -> None:
    graph = {**TOKENS["graph"], "pooled": {"block": "pooler", "input": "documents", "select": "mean"}}
    graph["scores"] = {**graph.pop("scores"), **node}
    with pytest.raises(tfkit.SpecError, match=message) as error:
        tfkit.load({**TOKENS, "graph": graph}, plugins=PLUGINS)
    assert error.value.diagnostics[0].path == path

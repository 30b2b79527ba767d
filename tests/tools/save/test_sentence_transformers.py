"""`tfkit save --layout sentence_transformers`: sentence-transformers opens the folder, and has the same embeddings.

sentence-transformers comes with `pip install --group around -e .`, in a separate environment.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

import tfkit
from tfkit.errors import SpecError
from tfkit.tools.common.companions import companions_of
from tfkit.tools.eject.remote_code.sentence_transformers import _encoder_of, _padded_settings, _pooler_of
from tfkit.tools.save.layouts import layouts_of

PLUGINS = tfkit.load_plugins(entry_points=False)
SYMBOLS = " ,abcdefghijklmnopqrstuvwxyzé"
TEXTS = ["a long query, which has many tokens", "b", " été", "a b c"]
OPEN = """\
import json, sys
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(sys.argv[1], trust_remote_code=True, device="cpu")
texts = json.loads(sys.argv[2])
print(json.dumps([model.encode(texts).tolist(), [model.tokenizer(text)["input_ids"] for text in texts]]))
"""


def twins_spec(select: str = "mean", **pooler: Any) -> dict[str, Any]:
    """A bi-encoder whose nodes alternate, so that no node takes the output of the node above it."""
    stack = {"n_layers": 2, "attention": {"kind": "mha", "n_heads": 2}, "ffn": {"kind": "gelu", "d_ff": 32}}
    return {
        "tfkit": 1,
        "name": "twins",
        "d_model": 16,
        "vocab_size": len(SYMBOLS),
        "max_len": 40,
        "norm": "layernorm",
        "inputs": ["document", "query"],
        "outputs": ["query_vector", "document_vector"],
        "graph": {
            "query_embedding": {"block": "embedding", "input": "query", "position": "learned"},
            "document_embedding": {"same": "query_embedding", "input": "document"},
            "query_encoder": {"block": "encoder", "input": "query_embedding", **stack},
            "document_encoder": {"same": "query_encoder", "input": "document_embedding"},
            "query_vector": {"block": "pooler", "input": "query_encoder", "select": select, **pooler},
            "document_vector": {"same": "query_vector", "input": "document_encoder"},
        },
    }


def twins(select: str = "mean", **pooler: Any) -> fx.GraphModule:
    return tfkit.build(tfkit.load(twins_spec(select, **pooler), plugins=PLUGINS), seed=4).eval()


def test_the_encoder_has_the_weights_of_queries() -> None:
    model = twins()
    encoder = _encoder_of(model, _pooler_of(model.meta["graph"]), PLUGINS)
    assert list(encoder.meta["graph"].inputs) == ["query"]
    tokens = torch.tensor([[3, 5, 2], [9, 1, 4]])
    vectors = model(query=tokens, document=tokens + 1)[0]
    torch.testing.assert_close(encoder.eval()(tokens).mean(1), vectors)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"activation": "tanh"}, "its outputs must be vectors of a `pooler` without activation"),
        ({}, "cannot be written for sentence-transformers without a tokenizer"),
    ],
)
def test_a_model_without_embeddings_of_texts_is_an_error(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    with pytest.raises(SpecError, match=message):
        tfkit.save(twins(**fields), tmp_path / "out", layout="sentence_transformers", plugins=PLUGINS)


def test_all_vectors_come_from_one_pooler() -> None:
    spec = twins_spec()
    assert _pooler_of(tfkit.load(spec, plugins=PLUGINS)).name == "query_vector"
    outputs = ["query_vector", "document_encoder", "document_vector"]
    with pytest.raises(SpecError, match=f"got {', '.join(outputs)}"):
        _pooler_of(tfkit.load({**spec, "outputs": outputs}, plugins=PLUGINS))


@pytest.mark.parametrize(
    ("settings", "added", "kind", "expected"),
    [
        ({"pad_token": "<p>", "eos_token": "<e>"}, ["<s>"], "WordLevel", "<p>"),
        ({"eos_token": "<e>"}, ["<s>"], "WordLevel", "<e>"),
        ({}, ["<s>"], "BPE", "<s>"),
        ({}, [], "WordLevel", "x"),
        ({}, [], "BPE", None),
    ],
)
def test_the_token_for_padding(
    settings: dict[str, str], added: list[str], kind: str, expected: str | None, tmp_path: Path
) -> None:
    tokens = [{"content": "plain", "special": False}, *({"content": text, "special": True} for text in added)]
    tokenizer = {"added_tokens": tokens, "model": {"type": kind, "vocab": {"x": 0, "y": 1}}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    graph = twins().meta["graph"]
    if expected is None:
        with pytest.raises(SpecError, match="its tokenizer has no special token"):
            _padded_settings(tmp_path, graph)
    else:
        assert _padded_settings(tmp_path, graph)["pad_token"] == expected


@pytest.mark.slow
@pytest.mark.parametrize("select", ["mean", "first", "last"])
def test_sentence_transformers_has_the_same_embeddings(select: str, tmp_path: Path) -> None:
    (tmp_path / "characters").mkdir()
    characters = tmp_path / "characters" / "chars.json"
    characters.write_text(json.dumps({"characters": SYMBOLS}), encoding="utf-8")
    model, folder = twins(select), tmp_path / "out"
    tfkit.save(model, folder, layout="sentence_transformers", files_from=characters.parent, plugins=PLUGINS)
    layouts_of(PLUGINS).check_folder(folder, force=True, companions=companions_of(characters.parent, None))
    pooling = json.loads((folder / "1_Pooling" / "config.json").read_text(encoding="utf-8"))
    assert [name for name, value in pooling.items() if value is True] == [
        f"pooling_mode_{({'mean': 'mean_tokens', 'first': 'cls_token', 'last': 'lasttoken'})[select]}"
    ]
    assert tfkit.load(folder / "spec.yaml", plugins=PLUGINS).outputs == ("query_encoder",)
    if find_spec("sentence_transformers") is None:
        pytest.skip("pip install --group around -e .")
    command = [sys.executable, "-c", OPEN, str(folder), json.dumps(TEXTS)]
    environment = {"HF_MODULES_CACHE": str(tmp_path / "code"), "HF_HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = str(Path(find_spec("sentence_transformers").origin).parents[1])  # type: ignore[union-attr, arg-type]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    embeddings, ids = json.loads(done.stdout.splitlines()[-1])
    assert ids == [[SYMBOLS.index(symbol) for symbol in text] for text in TEXTS]
    for embedding, tokens in zip(embeddings, ids, strict=True):
        row = torch.tensor([tokens])
        vector = F.normalize(model(query=row, document=row)[0][0], dim=0)
        torch.testing.assert_close(torch.tensor(embedding), vector, atol=1e-5, rtol=0)

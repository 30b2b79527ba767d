"""Small models for `tfkit generate`, and their tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tfkit
from tfkit.cli import main
from tfkit.decoding.generate import generate
from tfkit.decoding.text import load_tokenizer
from tfkit.tools.save.save import save

from ...decoding.test_text import byte_level

SPEC = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 60
max_len: 40
dropout: 0.1
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head}
init: {kind: normal, std: 1.0}
"""
LINES = ["the quick brown fox jumps over the lazy dog", "the end, the end\nof the fox\n"]
PAIR = """\
tfkit: 1
name: pair
d_model: 16
vocab_size: 60
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2, position: t5}, ffn: {kind: relu, d_ff: 24}}
  target_embedding: {block: embedding, input: target, tie: source_embedding}
  decoder:
    {block: decoder, memory: encoder, n_layers: 1, attention: {n_heads: 2, position: t5}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head, tie: source_embedding}
init: {kind: normal, std: 0.5}
"""
ENCODER = """\
tfkit: 1
name: reader
d_model: 16
vocab_size: 60
graph:
  embedding: {block: embedding}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head}
"""
WEIGHTS = ["--weights", "out/model.safetensors"]
PROMPT = [*WEIGHTS, "--prompt", "the quick"]
LIMIT = ["--max-new-tokens", "15"]
Golden = Callable[[str, str], None]
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with their weights, and a tokenizer beside them."""
    built = tmp_path_factory.mktemp("models")
    for name, spec in (("small", SPEC), ("pair", PAIR), ("reader", ENCODER)):
        (built / f"{name}.yaml").write_text(spec)
    for name, out in (("small", "out"), ("pair", "pair"), ("reader", "reader")):
        graph = tfkit.load(built / f"{name}.yaml")
        save(tfkit.build(graph, seed=4), built / out)
        byte_level(LINES, 60).save(str(built / out / "tokenizer.json"))
    (built / "reader" / "config.json").write_text('{"mask_token_id": 58}')
    (built / "empty").mkdir()
    return built


@pytest.fixture(autouse=True)
def stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TFKIT_DISABLE", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("small.yaml", ...)` gives standard output and standard error; it must end with `status`."""

    def call(*arguments: str, status: int = 0) -> tuple[str, str]:
        __tracebackhide__ = True
        actual = main(["generate", *arguments, "--no-plugins"])
        out, err = capsys.readouterr()
        assert actual == status, err
        return out, err

    return call


@pytest.fixture
def model(folder: Path) -> torch.fx.GraphModule:
    built = tfkit.build(folder / "small.yaml")
    built.load_state_dict(load_file(folder / "out" / "model.safetensors"))
    return built.eval()


def expected(folder: Path, model: torch.fx.GraphModule, prompt: str, new: int, **options: Any) -> list[str]:
    """The texts from Python, decoded all at once."""
    tokenizer = load_tokenizer(folder / "out" / "tokenizer.json")
    actual = generate(model, [tokenizer.encode(prompt)], max_new_tokens=new, **options)
    return [tokenizer.decode(row) for row in actual.rows()]

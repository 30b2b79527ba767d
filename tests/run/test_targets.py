"""Data and heads: every combination trains a step, or is one error when the run is read."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest

from tests.run.kinds.test_columns import LAYERS, QUESTIONS, ROWS, write_lines
from tests.run.training.runs import PLUGINS, TEXT, trained
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run

HEADS = {
    "tokens": "head: lm_head",
    "classes of positions": "head: {block: classifier, n_classes: 4}",
    "classes of examples": "pooler: {block: pooler, select: mean}, head: {block: classifier, n_classes: 4}",
}
DATA = {
    "text": "{kind: text, files: sheep.txt}",
    "copy": "{kind: copy, symbols: 7, items: 5, sequences: 40}",
    "mqar": "{kind: mqar, symbols: 16, positions: 20, pairs: 3, examples: 40}",
    "pairs": "{kind: pairs, files: rows.jsonl, layout: sequence}",
    "choices": "{kind: choices, files: quiz.jsonl}",
    "labels of examples": "{kind: labelled, files: rows.jsonl, text: source, target: label, tokenizer: characters}",
    "labels of positions": "{kind: labelled, files: tags.jsonl, text: source, target: tags, tokenizer: characters}",
}
FIT = {
    *(("tokens", name) for name in DATA if name != "labels of examples"),
    ("classes of positions", "labels of positions"),
    ("classes of examples", "labels of examples"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("targets")
    (folder / "sheep.txt").write_text(TEXT, encoding="utf-8")
    write_lines(folder / "rows.jsonl")
    write_lines(folder / "quiz.jsonl", QUESTIONS)
    tags = [[number * number % 7 % 4 for number, _ in enumerate(row["source"])] for row in ROWS]
    rows = [{"source": row["source"], "tags": numbers} for row, numbers in zip(ROWS, tags, strict=True)]
    write_lines(folder / "tags.jsonl", rows)
    return folder


@pytest.mark.parametrize(("head", "data"), [*product(HEADS, DATA)])
def test_targets_fit_the_head_or_are_an_error(head: str, data: str, folder: Path) -> None:
    length = "" if data in ("copy", "mqar") else ", length: 40"
    (folder / "run.yaml").write_text(
        f"tfkit: 1\nname: run\nmodel: {{vocab_size: data.vocab_size, d_model: 16, graph: {{embedding: embedding,\n"
        f"  encoder: {{block: encoder, n_layers: 1, {LAYERS}}}, {HEADS[head]}}}}}\ndata: {DATA[data]}\n"
        f"batch: {{sequences: 5{length}}}\nsteps: 1\noptimizer: {{kind: adamw, lr: 1e-2}}\n",
        encoding="utf-8",
    )
    if (head, data) in FIT:
        memory, _ = trained(load_run(folder / "run.yaml", PLUGINS))
        assert len(memory.losses) == 1
        return
    with pytest.raises(SpecError) as caught:
        load_run(folder / "run.yaml", PLUGINS)
    (error,) = caught.value.diagnostics
    assert (error.path, error.span and error.span.line) == ("data", 5)
    assert error.help is not None
    if head == "classes of positions" and data != "labels of examples":
        assert error.message.endswith("but `head` of the model returns 4 logits")
        assert "a head of at least `data.vocab_size` logits" in error.help
    else:
        each = ("example", "position") if data == "labels of examples" else ("position", "example")
        assert error.message == (
            f"the data has a target for each {each[0]}, but `head` of the model returns logits for each {each[1]}"
        )
        assert ("`text`" in error.help) is (data == "labels of examples")

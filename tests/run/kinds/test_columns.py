"""Rows of files: every format gives the same examples, and a training step has the loss of a loop over the rows."""

from __future__ import annotations

import csv
import json
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from torch.nn import functional as F

from tests.run.training.launches import forked, numbers, options
from tests.run.training.runs import Memory, same, trained
from tests.tools.common.moments import moments, restored
from tests.tools.train.test_folder import contents
from tfkit.cli import main
from tfkit.errors import Invalid, SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import IGNORE_INDEX, Batch, Ratio
from tfkit.run.kinds.columns import Digested, Ragged
from tfkit.run.kinds.labelled import LabelledExamples
from tfkit.run.kinds.measured import MeasuredExamples
from tfkit.run.kinds.metrics import ChoiceAccuracy
from tfkit.run.kinds.mixture import Mixture, _common_token, _joined_batches
from tfkit.run.kinds.pairs import Pairs
from tfkit.run.kinds.preferences import PreferenceExamples
from tfkit.run.kinds.text_pairs import TextPairExamples
from tfkit.run.read_rows import read_rows
from tfkit.run.run_spec import SplitConfig
from tfkit.run.training.evaluate import evaluate_splits
from tfkit.run.training.loop import Trainer
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.plan import run_plan

from .small import PLUGINS, refused

WORDS = ("ab", "cd", "efg", "h")
SOURCES = [" ".join(WORDS[number * step % 4] for step in range(1, 2 + number % 4)) for number in range(1, 25)]
ROWS = [
    {"source": text, "target": text[::-1][: 1 + number % 9], "label": ("odd", "even")[number % 2]}
    for number, text in enumerate(SOURCES)
]
CHOICES = ("ab", "cdefg", "h", "ij")
QUESTIONS = [
    {"prompt": f"is {text}", "choices": [f" {word}" for word in CHOICES[: 2 + number % 3]], "answer": number % 2}
    for number, text in enumerate(SOURCES)
]
LAYERS = "attention: {kind: mha, n_heads: 2, position: rope}, ffn: {kind: relu, d_ff: 24}"
MODELS = {
    "pair": f"""vocab_size: data.vocab_size,
        inputs: {{source: tokens, target: tokens}}, graph: {{
        embedding: {{block: embedding, input: source}},
        encoder: {{block: encoder, n_layers: 1, {LAYERS}}},
        prefix: {{block: embedding, input: target}},
        decoder: {{block: decoder, n_layers: 1, memory: encoder, cross_attention: {{kind: mha, n_heads: 2}}, {LAYERS}}},
        head: lm_head}}""",
    "sequence": f"""vocab_size: data.vocab_size, graph: {{
        embedding: embedding, decoder: {{block: decoder, n_layers: 1, {LAYERS}}}, head: lm_head}}""",
    "classes": f"""vocab_size: data.vocab_size, graph: {{embedding: embedding,
        encoder: {{block: encoder, n_layers: 1, {LAYERS}}},
        pooler: {{block: pooler, select: mean}}, classes: {{block: classifier, n_classes: data.n_classes}}}}""",
    "tasks": f"""vocab_size: data.vocab_size, outputs: [letter, row], graph: {{embedding: embedding,
        encoder: {{block: encoder, n_layers: 1, {LAYERS}}},
        letter: {{block: classifier, n_classes: data.n_classes.letter}},
        pooler: {{block: pooler, input: encoder, select: mean}},
        row: {{block: classifier, n_classes: data.n_classes.row}}}}""",
    "features": f"""inputs: {{x: {{type: features, width: 2}}}}, graph: {{
        project: {{block: linear, input: x}}, encoder: {{block: encoder, n_layers: 1, {LAYERS}}},
        classes: {{block: classifier, n_classes: data.n_classes}}}}""",
}


def write_lines(path: Path, rows: Sequence[Mapping[str, Any]] = ROWS) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def columns_run(folder: Path, model: str, data: str, *sets: str) -> Run:
    path = folder / "run.yaml"
    path.write_text(
        f"tfkit: 1\nname: rows\nmodel: {{d_model: 16, {MODELS[model]}}}\ndata: {data}\n"
        "batch: {sequences: 5, length: 40}\nsteps: 6\noptimizer: {kind: adamw, lr: 1e-2}\n",
        encoding="utf-8",
    )
    return load_run(path, PLUGINS, sets=sets)


# ---- files ----


def write_csv(path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(ROWS[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(ROWS)


def write_arrow(path: Path, rows: Sequence[Mapping[str, Any]], *, stream: bool) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.Table.from_pylist(list(rows))
    open_new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with open_new(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=7)


def test_every_format_has_the_same_examples(tmp_path: Path) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    write_lines(tmp_path / "rows.jsonl")
    write_csv(tmp_path / "rows.csv")
    write_csv(tmp_path / "rows.tsv")
    write_arrow(tmp_path / "rows.arrow", ROWS, stream=False)
    write_arrow(tmp_path / "stream.arrow", ROWS, stream=True)
    parquet.write_table(pa.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    folder = tmp_path / "folder"  # as `Dataset.save_to_disk` writes it
    folder.mkdir()
    for number, part in enumerate((ROWS[:10], ROWS[10:])):
        write_arrow(folder / f"data-{number:05}-of-00002.arrow", part, stream=True)
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    state = {"_data_files": [{"filename": name} for name in names], "_format_type": None, "_split": "train"}
    (folder / "state.json").write_text(json.dumps(state), encoding="utf-8")
    files = ["rows.jsonl", "rows.csv", "rows.tsv", "rows.arrow", "stream.arrow", "rows.parquet", "folder", "*.jsonl"]
    digests = {columns_run(tmp_path, "pair", f'{{kind: pairs, files: "{name}"}}').digest for name in files}
    assert len(digests) == 1
    write_lines(tmp_path / "rows.jsonl", [*ROWS[:-1], {**ROWS[-1], "target": "c"}])
    assert columns_run(tmp_path, "pair", "{kind: pairs, files: rows.jsonl}").digest not in digests


def test_rows_are_numbered_through_all_batches_of_a_file(tmp_path: Path) -> None:
    """pyarrow reads parquet in batches of 1,000 rows, and Arrow in the batches that were written."""
    parquet = pytest.importorskip("pyarrow.parquet")
    pa = pytest.importorskip("pyarrow")
    parquet.write_table(pa.table({"text": [str(number) for number in range(2003)]}), tmp_path / "rows.parquet")
    write_arrow(tmp_path / "rows.arrow", ROWS, stream=False)
    write_arrow(tmp_path / "stream.arrow", ROWS, stream=True)
    write_lines(tmp_path / "rows.jsonl")
    for name, count in (("rows.parquet", 2003), ("rows.arrow", 24), ("stream.arrow", 24), ("rows.jsonl", 24)):
        assert [row.number for row in read_rows(tmp_path / name)] == [*range(1, count + 1)]


def test_errors_of_files(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    pytest.importorskip("pyarrow")
    write_lines(tmp_path / "rows.jsonl")
    write_arrow(tmp_path / "cut.arrow", ROWS, stream=True)
    (tmp_path / "cut.arrow").write_bytes((tmp_path / "cut.arrow").read_bytes()[:700])
    write_lines(tmp_path / "number.jsonl", [*ROWS[:3], {**ROWS[3], "target": 5}])
    (tmp_path / "cut.jsonl").write_text('{"source": "a", "target": "b"}\n\n{"source": "a', encoding="utf-8")
    (tmp_path / "list.jsonl").write_text("[1, 2]\n", encoding="utf-8")
    (tmp_path / "latin.csv").write_bytes(b"source,target\na,\xe9\n")
    (tmp_path / "ragged.csv").write_text("source,target\na,b\na,b,c\n", encoding="utf-8")
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 nothing")
    (tmp_path / "empty.jsonl").write_text("", encoding="utf-8")
    (tmp_path / "folder" / "train").mkdir(parents=True)
    (tmp_path / "folder" / "train" / "state.json").write_text("{}", encoding="utf-8")
    names = ["absent.jsonl", "cut.arrow", "number.jsonl", "cut.jsonl", "list.jsonl", "latin.csv", "ragged.csv"]
    names += ["damaged.parquet", "empty.jsonl", "folder", "folder/train", "small.yaml"]
    data = [f"{{kind: pairs, files: {name}}}" for name in names]
    rows = "files: rows.jsonl"
    data += [f"{{kind: pairs, {rows}, source: sorce}}", f'{{kind: pairs, {rows}, end: "<end>"}}']
    data += ["{kind: pairs, files: {val: rows.jsonl}}", "{kind: pairs, files: {train: rows.jsonl}, split: {train: 1}}"]
    data += [f"{{kind: pairs, {rows}, tokenizer: {{kind: pretrained, path: nowhere}}}}"]
    data += [f"{{kind: labelled, {rows}}}", f"{{kind: labelled, {rows}, text: source}}"]
    data += [f"{{kind: labelled, {rows}, features: source, tokenizer: bytes}}"]
    data += [f"{{kind: labelled, {rows}, features: source}}"]
    data += [f"{{kind: labelled, {rows}, text: source, tokenizer: bytes, classes: [odd]}}"]
    data += [f"{{kind: choices, {rows}, prompt: source, choices: target}}"]
    golden("runs/columns_errors", "\n\n".join(refused(tmp_path, fields, length=20) for fields in data))


def test_examples_that_are_too_long(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    data = "{kind: labelled, files: rows.jsonl, divide: stored, text: source, tokenizer: bytes%s}"
    with pytest.raises(SpecError, match=r"`, line \d+ has \d+ positions, but `batch.length` is 6"):
        columns_run(tmp_path, "classes", data % "", "batch.length=6")
    for long, texts in (("skip", [text for text in SOURCES[:21] if len(text) <= 6]), ("cut", SOURCES[:21])):
        run = columns_run(tmp_path, "classes", data % f", long: {long}", "batch.length=6", "data.split={train: 0.9}")
        examples = run.data.examples("train", "sequential")
        batch = examples.batch(np.arange(len(examples)))
        masks = batch.masks["tokens"]
        rows = [bytes(row[mask].tolist()).decode() for row, mask in zip(batch.inputs["tokens"], masks, strict=True)]
        assert rows == [text[:6] for text in texts]
    write_lines(tmp_path / "rows.jsonl", [{"prompt": "is it", "choices": [" b", " bcd", " bcdef"], "answer": 1}] * 20)
    with pytest.raises(SpecError, match=r"line \d+ has 10 positions, but `batch.length` is 9"):  # also an alternative
        columns_run(tmp_path, "sequence", "{kind: choices, files: rows.jsonl, tokenizer: bytes}", "batch.length=9")


# ---- a step ----


def loss_alone(trainer: Trainer, row: Mapping[str, str], layout: str) -> tuple[torch.Tensor, int]:
    """The summed loss of a row, without padding, and the number of its targets; ids are as of the kind `bytes`."""
    source, answer = list(row["source"].encode()), [*row["target"].encode(), 257 if layout == "pair" else 256]
    if layout == "pair":
        inputs = {"source": source, "target": [256, *answer[:-1]]}
    else:
        inputs = {"tokens": [*source, *answer[:-1]]}
    logits = trainer.model(**{name: torch.tensor([ids]) for name, ids in inputs.items()})[0, -len(answer) :]
    return F.cross_entropy(logits, torch.tensor(answer), reduction="sum"), len(answer)


@pytest.mark.parametrize("layout", ["pair", "sequence"])
def test_a_step_on_pairs_is_that_of_a_loop_over_the_rows(layout: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    data = f"{{kind: pairs, files: rows.jsonl, layout: {layout}, tokenizer: bytes, order: sequential, divide: stored}}"
    trainer = Trainer(columns_run(tmp_path, layout, data, "machine.micro_batch=2"), Memory())
    trainer.model.double()
    batch = trainer.batch(1)
    assert set(batch.masks) == set(batch.inputs)
    loss, _ = trainer._gradients(batch, 1)
    gradients = {
        name: weight.grad.clone() for name, weight in trainer.model.named_parameters() if weight.grad is not None
    }
    trainer.model.zero_grad()
    alone, counts = zip(*(loss_alone(trainer, row, layout) for row in ROWS[:5]), strict=True)
    total = torch.stack(alone).sum() / sum(counts)
    total.backward()
    assert loss.item() == pytest.approx(total.item(), abs=1e-6)
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=0, atol=1e-12, msg=name)


def test_classes_of_texts(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    data = "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes, order: sequential, divide: stored}"
    batch = columns_run(tmp_path, "classes", data).data.examples("train", "sequential").batch(np.array([0, 3, 2]))
    assert batch.targets.tolist() == [1, 0, 1]
    for row, mask, number in zip(batch.inputs["tokens"], batch.masks["tokens"], (0, 3, 2), strict=True):
        assert bytes(row[mask].tolist()).decode() == SOURCES[number]


def test_splits_of_a_sorted_file_have_every_class(tmp_path: Path) -> None:
    rows = [{"text": f"{number:03}", "label": ("new", "old")[number >= 100]} for number in range(200)]
    write_lines(tmp_path / "rows.jsonl", rows)
    data = "{kind: labelled, files: rows.jsonl, text: text, tokenizer: bytes, order: sequential%s}"

    def split(data: str, name: str) -> tuple[list[str], set[int], Sequence[Any]]:
        run = columns_run(tmp_path, "classes", data)
        examples = run.data.examples(name, "sequential")
        batch = examples.batch(np.arange(len(examples)))
        texts = [bytes(row).decode() for row in batch.inputs["tokens"].tolist()]
        return texts, set(batch.targets.tolist()), run.file.notes

    (train, classes, notes), (val, classes_of_val, _) = split(data % "", "train"), split(data % "", "val")
    assert (len(train), len(val), sorted({*train, *val})) == (180, 20, [row["text"] for row in rows])
    assert (train, val) == (sorted(train), sorted(val))  # in stored order, for `order: sequential`
    assert classes == classes_of_val == {0, 1}
    assert not notes
    val, classes_of_val, notes = split(data % ", divide: stored", "val")
    assert (val, classes_of_val) == ([row["text"] for row in rows[180:]], {1})
    (note,) = notes
    assert note.message == "the split `val` has no row of 1 of the 2 classes that occur"
    assert note.notes == ("classes of column `label`: new",)
    assert note.span is not None
    with pytest.raises(SpecError, match="`divide` has no effect: `files` names the files of each split"):
        columns_run(tmp_path, "classes", data.replace("rows.jsonl", "{train: rows.jsonl}") % ", divide: stored")


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        ([0, 1, 2, "1"], "line 4: column `label` must be a class of the same type as in the rows before"),
        ([3, 1, True], "line 3: column `label` must be a class of the same type as in the rows before; got `true`"),
        ([0, 1, 2**31], "line 3: column `label` must be the name or the number of a class"),
    ],
)
def test_classes_must_have_one_type(labels: list[Any], message: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": "ab", "label": label} for label in labels])
    with pytest.raises(SpecError, match=message):
        columns_run(tmp_path, "classes", "{kind: labelled, files: {train: rows.jsonl}, text: text, tokenizer: bytes}")


def test_numbers_of_classes_that_no_row_has_are_a_warning(tmp_path: Path) -> None:
    labels = [0, 1, 2] * 5 + [1_000_000]
    write_lines(tmp_path / "rows.jsonl", [{"text": "ab", "label": label} for label in labels])
    data = "{kind: labelled, files: {train: rows.jsonl}, text: text, tokenizer: bytes%s}"
    (note,) = columns_run(tmp_path, "classes", data % "").file.notes
    assert note.message == "999,997 of the 1,000,001 classes of column `label` are in no row"
    assert re.fullmatch(r"the largest class is 1,000,000, in `.+`, line 16", note.notes[0])
    names = [{"text": "ab", "label": label} for label in ("1", "01", "10")]  # `01` is not the class of `1`
    write_lines(tmp_path / "rows.jsonl", names)
    assert columns_run(tmp_path, "classes", data % "").data.n_classes == 3  # type: ignore[attr-defined]


def test_a_column_that_a_row_has_twice_is_an_error(tmp_path: Path) -> None:
    texts = {"jsonl": '{"source": "a", "target": "b", "source": "c"}\n', "csv": "source,target,source\na,b,c\n"}
    for suffix, text in texts.items():
        (tmp_path / f"rows.{suffix}").write_text(text, encoding="utf-8")
        with pytest.raises(SpecError, match=r"`source`|'source'"):
            columns_run(tmp_path, "pair", f"{{kind: pairs, files: {{train: rows.{suffix}}}}}")


def test_data_without_classes(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    with pytest.raises(SpecError, match=r"`data.n_classes` must be a number, but the data has none"):
        columns_run(tmp_path, "classes", "{kind: documents, files: rows.jsonl, text: source}", "batch.length=10")
    masked = "{kind: masked, of: {kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes}}"
    with pytest.raises(SpecError, match="`masked` must have data whose targets are tokens; got classes"):
        columns_run(tmp_path, "classes", masked)


def test_numbered_classes_of_features(tmp_path: Path) -> None:
    rows = [{"x": [[1, number]] * (1 + number % 3), "label": [number % 3] * (1 + number % 3)} for number in range(30)]
    write_lines(tmp_path / "rows.jsonl", rows)
    run = columns_run(tmp_path, "features", "{kind: labelled, files: rows.jsonl, divide: stored, features: x}")
    batch = run.data.examples("train", "sequential").batch(np.array([1, 2]))
    assert batch.inputs["features"].tolist() == [[[1, 1], [1, 1], [0, 0]], [[1, 2], [1, 2], [1, 2]]]
    assert batch.targets.tolist() == [[1, 1, IGNORE_INDEX], [2, 2, 2]]
    assert len(trained(run)[0].losses) == 6
    with pytest.raises(SpecError, match=r"features of width 2, but `x` of the model takes .*3"):
        columns_run(tmp_path, "features", "{kind: labelled, files: rows.jsonl, features: x}", "model.inputs.x.width=3")
    for x in ([[1, 2, 3]], []):
        write_lines(tmp_path / "rows.jsonl", [*rows, {"x": x, "label": [0]}])
        with pytest.raises(SpecError, match=r"line 31(.|\n)*a list of numbers, or of lists of numbers, of width 2"):
            columns_run(tmp_path, "features", "{kind: labelled, files: rows.jsonl, features: x}")


# ---- several targets ----

TASKS = (
    "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes, order: sequential, divide: stored, target: %s}"
)
TWO_TASKS = TASKS % "{row: label, letter: letters}"
TASKS_LOSS = "loss={kind: cross_entropy, outputs: {letter: 1.0, row: 0.5}}"


def tasks_run(folder: Path, data: str = TWO_TASKS, *sets: str, loss: str = TASKS_LOSS) -> Run:
    rows = [{**row, "letters": [ord(letter) % 3 for letter in row["source"]]} for row in ROWS]
    write_lines(folder / "rows.jsonl", rows)
    return columns_run(folder, "tasks", data, loss, *sets)


def losses_alone(model: Any, numbers: Sequence[int]) -> dict[str, torch.Tensor]:
    """The mean loss of each task over some rows, without padding."""
    letters, rows = [], []
    for number in numbers:
        text = SOURCES[number]
        letter, row = model(torch.tensor([list(text.encode())]))
        expected = torch.tensor([ord(character) % 3 for character in text])
        letters.append(F.cross_entropy(letter[0], expected, reduction="none"))
        rows.append(F.cross_entropy(row, torch.tensor([("even", "odd").index(ROWS[number]["label"])])))
    return {"letter": torch.cat(letters).mean(), "row": torch.stack(rows).mean()}


def test_a_step_on_several_targets_is_the_sum_of_two_losses(tmp_path: Path) -> None:
    trainer = Trainer(tasks_run(tmp_path, TWO_TASKS, "machine.micro_batch=2"), Memory())
    trainer.model.double()
    loss, _ = trainer._gradients(trainer.batch(1), 1)
    weights = dict(trainer.model.named_parameters())
    gradients = {name: weight.grad.clone() for name, weight in weights.items() if weight.grad is not None}
    trainer.model.zero_grad()
    alone = losses_alone(trainer.model, range(5))
    (alone["letter"] + 0.5 * alone["row"]).backward()
    assert loss.tolist() == pytest.approx([part.item() for part in alone.values()], abs=1e-6)
    assert set(gradients) == set(weights)
    for name, weight in weights.items():
        torch.testing.assert_close(gradients[name], weight.grad, rtol=0, atol=1e-12, msg=name)


def test_metrics_of_several_targets(tmp_path: Path) -> None:
    sets = "eval={every: 3, splits: {val: all}, metrics: [loss, accuracy]}"
    run = tasks_run(tmp_path, TWO_TASKS, sets)
    trainer = Trainer(run, Memory())
    trainer.train()
    assert run.config.eval is not None
    numbers = evaluate_splits(trainer.model, run, run.config.eval.splits, run.config.eval.metrics)
    alone = losses_alone(trainer.model.eval(), range(21, 24))
    assert numbers["val.loss"] == pytest.approx(alone["letter"].item(), rel=1e-5)
    assert numbers["val.row.loss"] == pytest.approx(alone["row"].item(), rel=1e-5)
    assert set(numbers) == {"val.loss", "val.row.loss", "val.accuracy", "val.row.accuracy"}


def test_names_of_the_classes_of_one_of_several_targets(tmp_path: Path) -> None:
    examples = tasks_run(tmp_path, TWO_TASKS, "data.classes={row: [odd, even]}").data.examples("train", "sequential")
    targets = examples.batch(np.arange(9)).further_targets
    assert targets["row"].tolist() == [("odd", "even").index(row["label"]) for row in ROWS[:9]]
    letters = [[ord(letter) % 3 for letter in text] for text in SOURCES[:9]]
    assert [row[row != IGNORE_INDEX].tolist() for row in targets["letter"]] == letters


def test_errors_of_several_targets(
    tmp_path: Path, golden: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cases: list[tuple[str, tuple[str, ...], str]] = [
        (TASKS % "{}", (), TASKS_LOSS),
        (TASKS % "{row: label, letter: lettres}", (), TASKS_LOSS),
        (TASKS % "{row: label}", ("model.letter.n_classes=3",), TASKS_LOSS),
        (TASKS % "{row: label}", (), TASKS_LOSS),
        (TASKS % "label", (), TASKS_LOSS),
        (TWO_TASKS, ("model.row.n_classes=data.n_classes",), TASKS_LOSS),
        (TWO_TASKS, ("model.letter.n_classes=2",), TASKS_LOSS),
        (TWO_TASKS, (), "loss={kind: cross_entropy, outputs: {letter: 1.0}}"),
        (TWO_TASKS, (), "loss=cross_entropy"),
        (TWO_TASKS, ("data.classes=[odd, even]",), TASKS_LOSS),
        (TWO_TASKS, ("data.classes={rwo: [odd, even]}",), TASKS_LOSS),
        (TWO_TASKS, ("data.classes={row: [odd]}",), TASKS_LOSS),
        (TASKS % "label", ("data.classes={row: [odd, even]}",), TASKS_LOSS),
        (
            f"{{kind: mixture, of: {{tasks: {{data: {TWO_TASKS.replace(', order: sequential', '')}}}}}}}",
            (),
            TASKS_LOSS,
        ),
    ]
    errors = []
    for data, sets, loss in cases:
        with pytest.raises(SpecError) as error:
            tasks_run(Path(), data, *sets, loss=loss)
        assert len(error.value.diagnostics) == 1
        errors.append(str(error.value))
    golden("runs/targets_errors", "\n\n".join(errors))


# ---- choices ----


@pytest.mark.parametrize("normalize", [False, True])
def test_choices_are_compared_as_by_a_loop(normalize: bool, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", QUESTIONS)
    data = "{kind: choices, files: {train: rows.jsonl, val: rows.jsonl}, tokenizer: bytes}"
    run = columns_run(tmp_path, "sequence", data, "machine.micro_batch=2")
    trainer = Trainer(run, Memory())
    trainer.train()
    right = 0
    for row in QUESTIONS:
        scores = []
        for choice in row["choices"]:
            ids = torch.tensor([[*f"{row['prompt']}{choice}".encode()]])
            likelihood = trainer.model(ids).log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[-len(choice) :].sum()
            scores.append(likelihood.item() / (len(choice) if normalize else 1))
        right += int(np.argmax(scores)) == row["answer"]
    metric: Any = PLUGINS.registry.kinds("metric")["choice_accuracy"].config(normalize=normalize)
    numbers = evaluate_splits(trainer.model, run, {"val": SplitConfig(batches="all")}, [metric])
    assert numbers == {"val.choice_accuracy": right / len(QUESTIONS)}
    assert 0 < right < len(QUESTIONS)


def test_choices_need_continuations(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    sets = "eval={every: 3, splits: {val: all}, metrics: [choice_accuracy]}"
    run = columns_run(tmp_path, "sequence", "{kind: pairs, files: rows.jsonl, layout: sequence}", sets)
    with pytest.raises(SpecError, match="`choice_accuracy` needs examples with several continuations"):
        Trainer(run, Memory()).train()


# ---- tokenizers ----


@pytest.mark.slow
def test_a_folder_has_the_ids_of_its_tokenizer(tmp_path: Path) -> None:
    """A source has the special tokens around it that transformers puts there; a target has none."""
    letters = {letter: number for number, letter in enumerate(("<pad>", "<s>", "</s>", *map(chr, range(32, 127))))}
    library = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    template = tokenizers.processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    library.post_processor = template
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_object=library, bos_token="<s>", eos_token="</s>")
    theirs.save_pretrained(tmp_path / "tokenizer")
    write_lines(tmp_path / "rows.jsonl")
    data = '{kind: pairs, files: rows.jsonl, start: "<s>", end: "</s>", tokenizer: {kind: pretrained, path: tokenizer}}'
    run = columns_run(tmp_path, "pair", data)
    batch = run.data.examples("train", "sequential").batch(np.arange(1))
    assert run.data.vocab_size == len(letters)
    assert batch.inputs["source"][0].tolist() == theirs(ROWS[0]["source"]).input_ids
    assert [*batch.inputs["target"][0].tolist(), 2] == theirs(ROWS[0]["target"]).input_ids
    assert batch.targets[0].tolist() == theirs(ROWS[0]["target"]).input_ids[1:]


def arrays_of(value: object) -> Iterator[Any]:
    """Yield the arrays in examples. The `ends` of sequences follow from their sizes."""
    if isinstance(value, np.ndarray):
        yield value
    elif isinstance(value, Mapping):
        yield from (array for item in value.values() for array in arrays_of(item))
    elif not isinstance(value, bool | str):
        yield from (array for name, item in vars(value).items() if name != "ends" for array in arrays_of(item))


@pytest.mark.parametrize(
    "examples",
    [
        LabelledExamples(Ragged([[5, 6], [7]]), {"": Ragged([[0], [1]]), "b": Ragged([[1], [2]])}, {"": False}),
        MeasuredExamples(Ragged([[5, 6], [7]]), Ragged([[3], [4]]), each=False),
        PreferenceExamples(Ragged([[5], [6]]), Ragged([[7], [8]]), Ragged([[9], [1]])),
        TextPairExamples({"query": Ragged([[5], [6]]), "document": Ragged([[7], [8]])}, np.array([0, 1])),
        Pairs.of([([5], [[6], [7, 8]]), ([9], [[1]])], [1, 0], "pair"),
    ],
    ids=lambda examples: type(examples).__name__,
)
def test_examples_that_differ_in_a_number_have_different_digests(examples: Digested) -> None:
    count = len([*arrays_of(examples)])
    digests = {examples.digest()}
    for index in range(count):
        changed = deepcopy(examples)
        array = [*arrays_of(changed)][index]
        array.flags.writeable = True
        array[0] += 1
        digests.add(changed.digest())
    assert len(digests) == 1 + count > 3


# ---- lengths ----

COUNTED = {
    "pair": ("pair", "{kind: pairs, files: rows.jsonl}"),
    "sequence": ("sequence", "{kind: pairs, files: rows.jsonl, layout: sequence}"),
    "classes": ("classes", "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes}"),
    "choices": ("sequence", "{kind: choices, files: quiz.jsonl, tokenizer: bytes}"),
    "masked": ("sequence", "{kind: masked, choices: 3, of: {kind: pairs, files: rows.jsonl, layout: sequence}}"),
    "packed": ("sequence", "{kind: packed, separator: ' ', of: {kind: pairs, files: rows.jsonl, layout: sequence}}"),
}


@pytest.mark.parametrize("name", COUNTED)
def test_the_size_of_a_run_counts_positions_and_not_padding(name: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    write_lines(tmp_path / "quiz.jsonl", QUESTIONS)
    model, data = COUNTED[name]
    runs = [columns_run(tmp_path, model, data, "tokens=1700", f"batch.length={length}") for length in (24, 40)]
    examples = runs[0].data.examples("train", "sequential")
    batches = [examples.batch(np.array([index])) for index in range(len(examples))]  # alone, so without padding
    lengths = [max(ids.shape[1] for ids in batch.inputs.values()) for batch in batches]
    positions = sum(lengths)
    assert positions < len(examples) * max(lengths)
    padded = examples.batch(np.arange(len(examples)))
    assert sum(np.max([mask.sum(1) for mask in padded.masks.values()], axis=0)) == positions
    assert {run.tokens_of_step for run in runs} == {5 * positions / len(examples)}
    assert {run.steps for run in runs} == {-(-1700 * len(examples) // (5 * positions))}


def test_padding_is_counted_next_to_the_positions(tmp_path: Path) -> None:
    texts = ["a" * size for size in (3, 5, 11, 7, 2, 9)]
    write_lines(tmp_path / "rows.jsonl", [{"text": text, "label": len(text) % 2} for text in texts])
    data = "{kind: labelled, files: {train: rows.jsonl}, text: text, tokenizer: bytes, order: sequential}"
    run = columns_run(tmp_path, "classes", data, "batch.sequences=3", "epochs=1")
    size = run_plan(run)
    assert (size.steps, size.tokens, size.padding) == (2, 37, 3 * 11 + 3 * 9 - 37)
    exact = sum(flops_of_step(run.graph, 1, len(text)) for text in texts)
    assert 0.98 * exact < size.flops <= exact
    longer = columns_run(tmp_path, "classes", data, "batch.sequences=3", "epochs=1", "batch.length=200")
    assert run_plan(longer) == replace(size, digest=longer.digest, memory=run_plan(longer).memory)


def test_batches_without_padding_count_in_its_share(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl", [{"text": "a" * size, "label": size % 2} for size in (4, 4, 4, 7, 2, 9)])
    data = "{kind: labelled, files: {train: rows.jsonl}, text: text, tokenizer: bytes, order: sequential}"
    size = run_plan(columns_run(tmp_path, "classes", data, "batch.sequences=3", "epochs=1"))
    assert (size.tokens, size.padding) == (30, 3 * 4 + 3 * 9 - 30)


# ---- mixtures ----

PARTS = {
    "lines": "{weight: 3, data: {kind: documents, files: rows.jsonl, text: source, tokenizer: bytes}}",
    "pairs": "{data: {kind: pairs, files: rows.jsonl, layout: sequence, tokenizer: bytes}}",
}


def mixture(**changes: str) -> str:
    return f"{{kind: mixture, of: {{{', '.join(f'{name}: {part}' for name, part in (PARTS | changes).items())}}}}}"


def test_a_mixture_has_its_weights_and_every_example(tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    run = columns_run(tmp_path, "sequence", mixture(), "batch.length=20")
    assert run.data.splits == ["train", "lines_val", "pairs_val"]
    examples = run.data.examples("train", "shuffled")
    batch = examples.batch(np.arange(len(examples)))
    windows = batch.targets[:, 0] != IGNORE_INDEX  # a prompt does not count
    assert windows.sum() == 3 * (~windows).sum()
    assert run.tokens_of_step == pytest.approx(5 * batch.masks["tokens"].sum() / len(examples), rel=0.01)
    packed = mixture(lines=PARTS["lines"].replace("data: {", "data: {kind: packed, separator: 256, of: {") + "}")
    assert columns_run(tmp_path, "sequence", packed, "batch.length=20").tokens_of_step == run.tokens_of_step
    alone = columns_run(tmp_path, "sequence", PARTS["pairs"][7:-1], "batch.length=20").data
    parts = alone.examples("train", "shuffled").batch(np.arange(21))
    rows = {tuple(row[mask].tolist()) for row, mask in zip(parts.inputs["tokens"], parts.masks["tokens"], strict=True)}
    mixed = zip(batch.inputs["tokens"][~windows], batch.masks["tokens"][~windows], strict=True)
    assert {tuple(row[mask].tolist()) for row, mask in mixed} == rows


@pytest.mark.parametrize("lengths", [(5, 9, 7), (9, 7, 5), (7, 5, 9)])
def test_a_mixture_is_as_long_as_its_longest_part(lengths: tuple[int, ...]) -> None:
    parts: dict[str, Any] = {
        name: SimpleNamespace(vocab_size=11, length=length, tokenizer=None)
        for name, length in zip("abc", lengths, strict=True)
    }
    assert Mixture(parts, {"a": 2.0, "b": 3.0, "c": 0.0}, ()).length == 9


def test_errors_of_mixtures(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write_lines(tmp_path / "rows.jsonl")
    data = [mixture(pairs="{data: {kind: pairs, files: rows.jsonl, layout: sequence}}")]
    data += [mixture(pairs="{data: {kind: pairs, files: none.jsonl, layout: sequence}}")]
    data += [mixture(pairs="{data: {kind: pairs, files: rows.jsonl, order: sampled}}")]
    data += ["{kind: mixture, of: {lines: {weight: 0, data: addition}}}"]
    data += [f"{{kind: mixture, split: {{train: 1}}, of: {{lines: {PARTS['lines']}}}}}"]
    golden("runs/mixture_errors", "\n\n".join(refused(tmp_path, fields, length=20) for fields in data))


# ---- guarantees ----


@pytest.mark.parametrize(
    ("model", "data"),
    [
        ("pair", "{kind: pairs, files: rows.jsonl}"),
        pytest.param(
            "classes", "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes}", marks=pytest.mark.slow
        ),
        pytest.param("sequence", mixture(), marks=pytest.mark.slow),
    ],
)
def test_a_run_continues_to_the_bit(model: str, data: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "rows.jsonl")
    run = columns_run(tmp_path, model, data, "batch.length=20")
    memory, weights = trained(run)
    half, _ = trained(run, until=3)
    rest, continued = trained(columns_run(tmp_path, model, data, "batch.length=20"), Memory(half.saved))
    assert memory.losses == half.losses + rest.losses
    assert same(weights, continued)


CASES = {
    "pairs": ("pair", "{kind: pairs, files: rows.jsonl}", "[loss, exact_match]", "val"),
    "labelled": ("classes", "{kind: labelled, files: rows.jsonl, text: source, tokenizer: bytes}", "[accuracy]", "val"),
    "choices": ("sequence", "{kind: choices, files: quiz.jsonl, tokenizer: bytes}", "[loss, choice_accuracy]", "val"),
    "mixture": ("sequence", mixture(), "[loss]", "pairs_val"),
}


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The arguments of a run on one of the kinds, in the current folder."""
    model, data, metrics, split = CASES[request.param]
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "rows.jsonl")
    write_lines(tmp_path / "quiz.jsonl", QUESTIONS)
    columns_run(tmp_path, model, data, "batch.length=20")
    sets = [f"eval={{every: 3, splits: {{{split}: all}}, metrics: {metrics}}}", "checkpoint={every: 2}"]
    return ["run.yaml", *options("batch.length=20", "batch.sequences=4", *sets)]


@pytest.mark.slow
def test_a_killed_run_ends_with_the_same_bytes(case: list[str]) -> None:
    with moments(Path("whole")) as states:
        assert main(["train", *case, "-o", "whole"]) == 0
    for number, state in enumerate(random.Random(0).sample(states, 12)):
        folder = restored(state, Path(f"again-{number}"))
        assert main(["train", *case, "-o", str(folder)]) == 0
        assert contents(str(folder)) == contents("whole")


@pytest.mark.slow
def test_processes_change_only_the_last_digits(case: list[str]) -> None:
    for count in (1, 2):
        forked(Path(), count, *case, "-o", f"out-{count}")
    single, double = numbers(Path("out-1")), numbers(Path("out-2"))
    assert len(single) == len(double) == 6 + 3
    for line, other in zip(single, double, strict=True):
        assert line == pytest.approx(other, abs=1e-5)


def test_a_tie_is_no_right_choice() -> None:
    metric = ChoiceAccuracy(normalize=False)
    nats, counts = torch.tensor([[1.0, 2.0], [2.0, 2.0], [2.0, 1.0]]), torch.ones(3, 2, dtype=torch.long)
    assert metric.sums(nats, counts) == Ratio(1, 3)


@pytest.mark.parametrize(("end", "size"), [(None, 5), (3, 5), (7, 8), (8, 9)])
def test_an_end_of_choices_may_lie_behind_the_vocabulary(end: int | None, size: int) -> None:
    config: Any = PLUGINS.registry.kinds("data")["choices"].config.model_construct(end=end)
    assert config.form(SimpleNamespace(vocab_size=5)).vocab_size == size


@pytest.mark.parametrize(
    "change", [{"inputs": {"other": np.ones((2, 3), np.int64)}}, {"targets": np.ones(2, np.int64)}]
)
def test_parts_of_a_mixture_have_the_same_inputs_and_targets_for_each_position(change: dict[str, Any]) -> None:
    batch = Batch({"tokens": np.ones((2, 3), np.int64)}, np.ones((2, 3), np.int64))
    assert len(_joined_batches([batch, batch], np.arange(4)).targets) == 4
    assert (_common_token([256, 256]), _common_token([256, 7]), _common_token([256, None])) == (256, None, None)
    with pytest.raises(Invalid, match="all parts with a weight must have the same inputs"):
        _joined_batches([batch, replace(batch, **change)], np.arange(4))

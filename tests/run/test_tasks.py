"""Tasks: reading, encoding and scoring questions, in runs and for folders of models."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import tfkit
from tfkit.cli import main
from tfkit.errors import Invalid, SpecError
from tfkit.run.checked_run import Run, load_run
from tfkit.run.task_files import FOLDER, read_task_file, shipped_tasks
from tfkit.run.tasks import encoded_task
from tfkit.run.training.loop import Trainer
from tfkit.run.training.processes import Processes
from tfkit.run.training.task_scores import TaskScorer
from tfkit.tools.eval_.questions import compare_questions
from tfkit.tools.sweep.equal import evaluation_differences
from tfkit.tools.train.check.data import metric_values
from tfkit.tools.train.check.run_under_test import reduced_run
from tfkit.tools.train.plan import run_plan

from .training.runs import Memory

ROOT = Path(__file__).parents[2]
PLUGINS = tfkit.load_plugins(entry_points=False)
ROWS = [
    {"prompt": "one", "choices": [" two", " three.", " no"], "answer": 0},
    {"prompt": "the sea ", "choices": ["is", "are"], "answer": 0},
    {"prompt": "a", "choices": ["b", "cd"], "answer": 1},
    {"prompt": "ship and", "choices": [" sail sail", " sea"], "answer": 0},
]
RUN: dict[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "model": {
        "d_model": 16,
        "vocab_size": "data.vocab_size",
        "graph": {
            "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 24}},
            "decoder": {
                "block": "decoder",
                "n_layers": 1,
                "attention": {"kind": "mha", "n_heads": 2},
                "ffn": {"kind": "relu", "d_ff": 16},
            },
            "logits": "lm_head",
        },
    },
    "data": {"kind": "text", "files": "text.txt"},
    "batch": {"sequences": 4, "length": 8},
    "steps": 4,
    "optimizer": {"kind": "adamw", "lr": 0.01},
    "eval": {"every": 2, "tasks": ["short.jsonl"]},
}


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a text and a task."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("the sea and the ship. two, three: one sail is no bcd. " * 20, encoding="utf-8")
    write_rows(tmp_path / "short.jsonl", ROWS)
    return tmp_path


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def read(**changes: Any) -> Run:
    return load_run({**RUN, **changes}, PLUGINS)


# ---- scores ----


def likelihood(model: Any, prompt: list[int], continuation: list[int]) -> float:
    """Return the log-likelihood of a continuation, token by token."""
    ids, total = list(prompt), 0.0
    for token in continuation:
        total += float(F.log_softmax(model(torch.tensor([ids]))[0, -1].double(), -1)[token])
        ids.append(token)
    return total


@pytest.mark.usefixtures("here")
def test_scores_are_those_of_a_loop_over_tokens() -> None:
    run = read()
    model, (task,), tokenizer = tfkit.build(run.graph, seed=3).eval(), run.tasks, run.data.tokenizer
    assert tokenizer is not None
    expected, correct, by_size = [], [], []
    for row in ROWS:
        prompt = row["prompt"].rstrip()
        texts = [row["prompt"][len(prompt) :] + choice for choice in row["choices"]]
        with torch.no_grad():
            sums = [likelihood(model, [*tokenizer.encode(prompt)], [*tokenizer.encode(text)]) for text in texts]
        expected += sums
        correct.append(float(np.argmax(sums) == row["answer"]))
        means = [value / len(choice) for value, choice in zip(sums, row["choices"], strict=True)]
        by_size.append(float(np.argmax(means) == row["answer"]))
    for positions in (1, 9, 1000):
        scores = TaskScorer(model, run.config.loss).scores(task, lambda compute: compute(positions))  # noqa: B023
        np.testing.assert_allclose(scores.likelihoods, expected, rtol=1e-5)
    assert task.numbers(scores) == {"short.acc": np.mean(correct), "short.acc_norm": np.mean(by_size)}
    assert {0.0, 1.0} == {*correct}
    assert correct != by_size


@pytest.mark.usefixtures("here")
def test_the_first_questions_have_all_of_their_choices() -> None:
    (task,) = read().tasks
    first = task.first(2)
    assert [question.answer for question in first.file.questions] == [0, 0]
    assert len(first.continuations) == len(ROWS[0]["choices"]) + len(ROWS[1]["choices"])
    assert first.positions == sum(len(continuation.ids) - 1 for continuation in task.continuations[:5])


class OneOf(Processes):
    """A process of three that computes alone; its sums lack the rows of the others."""

    def __init__(self, rank: int) -> None:
        self.rank, self.count = rank, 3


@pytest.mark.usefixtures("here")
def test_processes_share_the_rows() -> None:
    run = read()
    model, (task,) = tfkit.build(run.graph, seed=3).eval(), run.tasks
    full = TaskScorer(model, run.config.loss).scores(task, lambda compute: compute(30))
    calls: list[int] = []
    model.register_forward_hook(lambda *_: calls.append(1))
    parts, counts = [], []
    for rank in range(3):
        calls.clear()
        scorer = TaskScorer(model, run.config.loss, processes=OneOf(rank))
        parts.append(scorer.scores(task, lambda compute: compute(14)))
        counts.append(len(calls))
    np.testing.assert_allclose(sum(part.likelihoods for part in parts), full.likelihoods, rtol=1e-6)
    assert sum(part.greedy for part in parts).tolist() == full.greedy.tolist()
    assert len({*counts}) == 1  # each call of a sharded model is a collective operation


@pytest.mark.usefixtures("here")
def test_a_prompt_that_is_too_long_loses_its_beginning(here: Path) -> None:
    write_rows(
        here / "short.jsonl",
        [{"source": "the sea and the ship and the sea", "target": " is"}, {"source": "a", "target": "b"}],
    )
    (task,) = read().tasks
    assert task.cut == 1
    assert task.longest == 24
    assert task.names == ["short.acc", "short.perplexity"]
    assert Trainer(read(), Memory()).notes["short"] == "prompts that are longer than `max_len` lose their beginning: 1"
    tokenizer = read().data.tokenizer
    assert tokenizer is not None
    assert task.continuations[0].ids.tolist() == [*tokenizer.encode("the sea and the ship and the sea is")][-25:]
    write_rows(here / "short.jsonl", [{"source": "a", "target": "the sea and the ship and the sea"}])
    with pytest.raises(
        SpecError, match=r"short.jsonl`, line 1: a continuation has 32 tokens, but the model has max_len"
    ):
        read()


def test_special_tokens_before_a_text_belong_to_the_prompt(here: Path) -> None:
    class Special:
        """Encodes bytes, with a token before and one after each text."""

        vocab_size = 300

        def encode(self, text: str) -> list[int]:
            return [298, *text.encode(), 299]

        def encode_bare(self, text: str) -> list[int]:
            return [*text.encode()]

    write_rows(here / "short.jsonl", [{"source": "ab ", "target": "c"}, {"source": "", "target": "c"}])
    first, second = encoded_task(read_task_file("short.jsonl"), "short", Special(), None, None).continuations  # type: ignore[arg-type]
    assert (first.ids.tolist(), first.size) == ([298, *b"ab c"], 2)
    assert (second.ids.tolist(), second.size) == ([298, *b"c"], 1)


def test_an_empty_prompt_needs_a_token(here: Path) -> None:
    write_rows(here / "short.jsonl", [{"source": "", "target": "ab"}])
    file, tokenizer = read_task_file("short.jsonl"), tfkit.ByteTokenizer()
    with pytest.raises(Invalid, match="line 1: the prompt must have a token; it is empty"):
        encoded_task(file, "short", tokenizer, None, None)
    (part,) = encoded_task(file, "short", tokenizer, 7, None).continuations
    assert (part.ids.tolist(), part.size) == ([7, *b"ab"], 2)
    (part,) = encoded_task(file, "short", tokenizer, ord("a"), None).continuations
    assert (part.ids.tolist(), part.size) == ([*b"ab"], 1)  # as in lm-evaluation-harness


# ---- runs ----


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def test_a_run_reports_its_tasks(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callbacks = [{"kind": "patience", "metric": "short.acc_norm", "better": "higher", "evaluations": 9}, "ema"]
    trained = tfkit.train({**RUN, "callbacks": callbacks}, output="out", quiet=True)
    evaluated = [line for line in lines("out") if "short.acc" in line]
    assert [line["step"] for line in evaluated] == [0, 2, 4]
    assert all("ema.short.acc" in line for line in evaluated)
    numbers = tfkit.evaluate("out", tasks=["short.jsonl"])
    assert numbers == {name: evaluated[-1][name] for name in ("short.acc", "short.acc_norm")}
    assert {*tfkit.evaluate("out")} == {*numbers, "val.loss"}
    facts = json.loads((trained.folder / "run.json").read_text(encoding="utf-8"))
    assert facts["meaning"]["eval.tasks.0.file_content"] == read().tasks[0].file.digest
    assert str(here / "short.jsonl") in (trained.folder / "run.yaml").read_text(encoding="utf-8")
    capsys.readouterr()
    assert main(["eval", "out", "--task", "short.jsonl", "--split", "val"]) == 0
    printed = capsys.readouterr().out
    assert "val.loss" in printed
    assert f"short.acc        {numbers['short.acc']:.4f} ± 0.2" in printed


@pytest.mark.usefixtures("here")
def test_tasks_change_no_step_and_a_resumed_run_has_equal_numbers() -> None:
    tfkit.train({**RUN, "checkpoint": {"every": 1}}, output="whole", quiet=True)
    tfkit.train({**RUN, "eval": None}, output="without", quiet=True)
    tfkit.train({**RUN, "checkpoint": {"every": 1}}, output="parts", quiet=True, stop_after=3)
    tfkit.train("parts", quiet=True)
    numbers = [{name: value for name, value in line.items() if name != "tokens/s"} for line in lines("whole")]
    again = [{name: value for name, value in line.items() if name != "tokens/s"} for line in lines("parts")]
    assert numbers == again
    losses = [[line["loss"] for line in lines(name) if "loss" in line] for name in ("whole", "without")]
    assert losses[0] == losses[1]


def test_the_digest_is_that_of_the_questions(here: Path) -> None:
    before = read()
    write_rows(here / "other.jsonl", [dict(reversed(row.items())) for row in ROWS])
    same = read(eval={"every": 2, "tasks": [{"file": "other.jsonl", "name": "short"}]})
    assert same.tasks[0].file.digest == before.tasks[0].file.digest
    write_rows(here / "short.jsonl", [*ROWS[:-1], {**ROWS[-1], "answer": 1}])
    after = read()
    assert after.digest != before.digest
    assert after.semantics.differences(before.semantics.values) == ["eval.tasks.0.file_content"]


@pytest.mark.usefixtures("here")
def test_the_plan_counts_all_continuations() -> None:
    with_task, splits = read(), {"val": "all"}
    alone, together = (
        run_plan(read(eval={"every": 2, "splits": splits, **further})).flops_of_evaluations
        for further in ({}, {"tasks": ["short.jsonl"]})
    )
    task = with_task.tasks[0]
    assert task.positions == sum(len(part.ids) - 1 for part in task.continuations)
    per_position = run_plan(read(eval={"every": 2, "splits": splits})).flops / 3 / (4 * 4 * 8)
    assert (together - alone) == pytest.approx(3 * task.positions * per_position, rel=0.02)


@pytest.mark.usefixtures("here")
def test_runs_are_compared_on_equal_questions(here: Path) -> None:
    write_rows(here / "other.jsonl", ROWS[:-1])
    base, other = read(), read(eval={"every": 2, "tasks": [{"file": "other.jsonl", "name": "short"}]})
    assert evaluation_differences(base, read(batch={"sequences": 2, "length": 8}), "short.acc") == []
    (difference,) = evaluation_differences(base, other, "short.acc")
    assert difference.startswith("eval.tasks.short_content: ")


# ---- errors ----


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "missing file": ({"tasks": ["agrement"]}, "there is no task `agrement`.*similar name exists: `agreement`"),
    "split": ({"tasks": ["short.jsonl"], "splits": {"short": "all"}}, "there is no split `short`"),
    "twice": ({"tasks": ["short.jsonl", "short.jsonl"]}, "name of a task must be unique.*got `short` twice"),
    "suffix": ({"tasks": ["text.txt"]}, "`text.txt` must be a task; got `.txt`"),
    "columns": ({"tasks": ["columns.jsonl"]}, "columns.jsonl`, line 1 must have the columns `prompt`"),
    "answer": (
        {"tasks": ["answer.jsonl"]},
        "line 2: column `answer` must be the number of a continuation, from 0 to 1",
    ),
    "characters": ({"tasks": ["characters.jsonl"]}, "characters.jsonl`, line 1: not among the .* characters"),
    "name": ({"tasks": ["Short-1.jsonl"]}, "the name of a task must have letters .* got `Short-1`"),
    "nothing": ({}, "there is nothing to evaluate"),
    "metrics": ({"tasks": ["short.jsonl"], "metrics": ["accuracy"]}, "`metrics` has no effect without `splits`"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_task_that_cannot_be_used_is_an_error(name: str, here: Path) -> None:
    write_rows(here / "columns.jsonl", [{"text": "a"}])
    write_rows(here / "answer.jsonl", [{"prompt": "a", "choices": ["b", "c"], "answer": number} for number in (1, 2)])
    write_rows(here / "characters.jsonl", [{"source": "a", "target": "Q"}])
    write_rows(here / "Short-1.jsonl", ROWS)
    changes, message = WRONG[name]
    with pytest.raises(SpecError, match=f"(?s){message}"):
        read(eval={"every": 2, **changes})


@pytest.mark.usefixtures("here")
def test_a_task_needs_a_decoder_and_a_tokenizer() -> None:
    encoder = {**RUN["model"]["graph"], "decoder": {**RUN["model"]["graph"]["decoder"], "block": "encoder"}}
    with pytest.raises(SpecError, match="a task must have a model that predicts the next tokens"):
        read(model={**RUN["model"], "graph": encoder})
    with pytest.raises(SpecError, match="a task must have a tokenizer; the data has none"):
        read(data={"kind": "copy", "items": 4}, batch={"sequences": 4})


# ---- folders of models, and comparisons ----


@pytest.mark.slow
def test_a_folder_has_the_numbers_of_its_run(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for seed in (0, 1):
        tfkit.train({**RUN, "seed": seed}, output=f"run{seed}", quiet=True)
    assert main(["save", "run1", "--layout", "tfkit", "-o", "model"]) == 0
    assert main(["eval", "run1", "--task", "short.jsonl", "--json"]) == 0
    of_run = json.loads(capsys.readouterr().out.partition("{")[2].join(["{", ""]))
    assert main(["eval", "model", "run0", "--task", "short.jsonl", "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["model"] == of_run["run1"]
    assert both["model"]["stderr"].keys() == {"short.acc", "short.acc_norm"}
    compared = both["run0"]["compared"]["short.acc"]
    assert compared["gained"] - compared["lost"] == round(4 * (both["run0"]["short.acc"] - both["model"]["short.acc"]))
    assert main(["eval", "model", "--task", "short.jsonl", "--split", "val"]) == 2
    assert "--split and --metric must belong to runs; `model` is a model" in capsys.readouterr().err
    (here / "model" / "chars.json").unlink()
    assert main(["eval", "model", "--task", "short.jsonl"]) == 1
    assert "a task must have a tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize("option", [["--split", "val"], ["--metric", "loss"]])
def test_an_option_of_runs_names_the_model_that_lacks_it(
    option: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "run.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    model = {"tfkit": 1, "name": "small", **RUN["model"], "vocab_size": 30}
    (here / "model.yaml").write_text(json.dumps(model), encoding="utf-8")
    assert main(["eval", "run.yaml", "model.yaml", "--task", "short.jsonl", *option]) == 2
    assert "--split and --metric must belong to runs; `model.yaml` is a model" in capsys.readouterr().err


@pytest.mark.parametrize(("gained", "lost", "even"), [(0, 0, 3), (3, 0, 5), (6, 0, 1), (12, 30, 60), (40, 20, 0)])
def test_the_comparison_is_the_test_of_mcnemar(gained: int, lost: int, even: int) -> None:
    stats = pytest.importorskip("scipy.stats")
    values = np.array([1.0] * gained + [0.0] * lost + [1.0] * even)
    base = np.array([0.0] * gained + [1.0] * lost + [1.0] * even)
    actual, n = compare_questions(values, base), len(values)
    assert (actual.gained, actual.lost, actual.questions) == (gained, lost, n)
    if not gained + lost:
        assert actual.p == 1
        assert actual.interval == (0, 0)
        return
    expected = stats.binomtest(gained, gained + lost)
    ends = expected.proportion_ci(0.95, "exact")
    assert actual.p == pytest.approx(expected.pvalue)
    assert actual.interval == pytest.approx([(2 * end - 1) * (gained + lost) / n for end in ends])
    assert (actual.p < 0.05) == (actual.interval[0] > 0 or actual.interval[1] < 0)


# ---- the tasks that come with tfkit ----


def test_the_shipped_tasks_are_those_of_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("make_tasks", ROOT / "tools" / "make_tasks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module, "FOLDER", tmp_path)
    module.main()
    written = {path.stem: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {name: (FOLDER / f"{name}.jsonl").read_bytes() for name in shipped_tasks()}
    for name in written:
        rows = [json.loads(line) for line in written[name].decode().splitlines()]
        assert len(rows) >= 100
        assert len({json.dumps(row) for row in rows}) == len(rows)
    answers = [question.answer for question in read_task_file("agreement").questions]
    assert 80 <= sum(answers) <= 120  # no answer is a better guess


# ---- YAML of lm-evaluation-harness: its numbers are in test_harness_tasks.py ----

TASK = """\
task: local
dataset_path: json
dataset_kwargs: {data_files: {test: rows.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: options
doc_to_target: 0
"""
REJECTED: dict[str, tuple[str, str, str, str]] = {
    "function": (
        "doc_to_target: 0",
        "process_docs: !function utils.process\ndoc_to_target: 0",
        "`process_docs` must not run code of the task; got `!function utils.process`",
        "8:15",
    ),
    "hub": ("dataset_path: json", "dataset_path: owner/data", "`dataset_path` must be a format of local files", "2:15"),
    "few shots": ("test_split: test", "test_split: test\nnum_fewshot: 5", "`num_fewshot` must be 0; got 5", "5:14"),
    "filter": ("test_split: test", "test_split: test\nfilter_list: [a]", "the key `filter_list` cannot be read", "5:1"),
    "group": ("task: local", "group: local", "a task with the key `group` cannot be read", "1:1"),
    "key": ("test_split: test", "test_split: test\ndoc_to_txt: a", "`doc_to_txt` is not a key of a task", "5:13"),
    "generation": ("multiple_choice", "generate_until", "`doc_to_choice` has no effect on `loglikelihood`", "7:16"),
    "metric": ("test_split: test", "test_split: test\nmetric_list: [{metric: f1}]", "there is no metric `f1`", "5:15"),
    "split": ("test_split: test", "test_split: dev", "`data_files` must have the split `dev`; got test", "3:17"),
    "file": ("rows.jsonl", "missing.jsonl", "there is no file `missing.jsonl`", "3:17"),
    "column": (
        "{{text}}",
        "{{txt}}",
        "`doc_to_text` cannot be rendered for `rows.jsonl`, line 1: 'txt' is undefined",
        "6:14",
    ),
    "template": ("{{text}}", "{{text", "unexpected end of template", "6:14"),
    "code": (
        "{{text}}",
        "{{text.__class__.mro()}}",
        "access to attribute '__class__' of 'str' object is unsafe",
        "6:14",
    ),
    "choices": ("options", "text", "`doc_to_choice` must be a list of two texts or more; got `a`", "7:16"),
    "target": ("doc_to_target: 0", "doc_to_target: 2", "an index from 0 to 1; got `2`", "8:16"),
    "several": ("doc_to_target: 0", "doc_to_target: [0, 1]", "an index from 0 to 1; got `[0, 1]`", "8:16"),
    "include": ("task: local", "include: owner/task", "`include` must be a local file; got `owner/task`", "1:10"),
    "itself": ("task: local", "include: local.yaml", "a file cannot include itself", "1:10"),
}


@pytest.mark.parametrize("name", REJECTED)
def test_a_task_in_yaml_that_needs_more_is_rejected_by_name(name: str, here: Path) -> None:
    old, new, message, location = REJECTED[name]
    write_rows(here / "rows.jsonl", [{"text": "a", "options": [" b", " c"]}])
    assert old in TASK
    (here / "local.yaml").write_text(TASK.replace(old, new, 1), encoding="utf-8")
    with pytest.raises((SpecError, Invalid)) as caught:
        read_task_file("local.yaml")
    assert message in str(caught.value)
    assert f"local.yaml:{location}" in str(caught.value)


@pytest.mark.parametrize(
    ("include", "line", "name"),
    [
        ("[first.yaml, second.yaml]", "", "second"),
        ("[second.yaml, first.yaml]", "", "first"),
        ("[second.yaml, third.yaml]", "", "first"),  # which the third includes
        ("[first.yaml, second.yaml]", "task: third\n", "third"),
    ],
)
def test_of_included_files_the_last_applies_and_the_file_itself(include: str, line: str, name: str, here: Path) -> None:
    write_rows(here / "rows.jsonl", [{"text": "a", "options": [" b", " c"]}])
    for word, content in (("first", "task: first\n"), ("second", "task: second\n"), ("third", "include: first.yaml\n")):
        (here / f"{word}.yaml").write_text(content, encoding="utf-8")
    (here / "local.yaml").write_text(f"include: {include}\n{line}{TASK.partition('task: local')[2]}", encoding="utf-8")
    assert read_task_file("local.yaml").name == name


VALUES = (
    *("null", "-1", "1.5", "true", "[]", "[1]", "{a: 1}", "[acc]", "[{metric: [1]}]", "text", "number", '""'),
    *('"{{number}}"', '"{{ 1 / 0 }}"', '"["', "{data_files: {test: []}}", "{data_files: /dev/zero}"),
)


MORE = "target_delimiter: a\ndescription: a\nmetric_list: [{metric: acc}]\nnum_fewshot: 0\nrepeats: 1\ninclude: null\n"


@pytest.mark.parametrize("key", [line.partition(":")[0] for line in (TASK + MORE).splitlines()])
def test_no_value_of_a_key_is_an_exception_of_python(key: str, here: Path) -> None:
    write_rows(here / "rows.jsonl", [{"text": "a", "options": [" b", " c"], "number": 3}])
    lines = (TASK + MORE).splitlines()
    without_location = []
    for value in VALUES:
        changed = (f"{key}: {value}" if line.startswith(f"{key}:") else line for line in lines)
        (here / "local.yaml").write_text("\n".join(changed), encoding="utf-8")
        try:
            encoded_task(read_task_file("local.yaml"), "local", tfkit.ByteTokenizer(), 0, None)
        except SpecError as error:
            without_location += [value for diagnostic in error.diagnostics if diagnostic.span is None]
    assert not without_location


def test_a_changed_file_is_read_again(here: Path) -> None:
    write_rows(here / "rows.jsonl", [{"text": "a", "options": [" b", " c"]}])
    (here / "local.yaml").write_text(TASK, encoding="utf-8")
    first = read_task_file("local.yaml")
    assert read_task_file("local.yaml") is first
    write_rows(here / "rows.jsonl", [{"text": "ab", "options": [" b", " c"]}])
    assert read_task_file("local.yaml").questions[0].source == "ab"


def test_the_check_of_a_run_evaluates_its_tasks(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    subject = reduced_run(read(), PLUGINS)
    assert [deviation.error < 1e-6 for deviation in metric_values.measure(subject) if deviation.where == "task"] == [
        True
    ]
    original = TaskScorer._row_scores
    monkeypatch.setattr(TaskScorer, "_row_scores", lambda self, *rest: original(self, *rest) * len(rest[-1]))
    assert [deviation.error > 0.1 for deviation in metric_values.measure(subject) if deviation.where == "task"] == [
        True
    ]

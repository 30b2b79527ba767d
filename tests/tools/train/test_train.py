"""Training and evaluation from Python, and the page of a run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import yaml

import tfkit
from tests.run.training.runs import RUN, write_run
from tfkit.cli import main
from tfkit.errors import SpecError
from tfkit.run.contract import Training
from tfkit.tools.common.history import History, read_history
from tfkit.tools.train import command, plan
from tfkit.tools.train.plan import Plan, Utilisation
from tfkit.tools.train.progress import TrainingProgress
from tfkit.tools.train.report import LAST_TEXTS, MAX_POINTS, _binned_points, _text_contents
from tfkit.tools.train.train import Trained
from tfkit.tools.train.weight_settings import SettingsGroup

SETS = [
    "eval={every: 4, splits: {val: {batches: 2}, train: {batches: 2}}, metrics: [loss, accuracy]}",
    "callbacks={kind: samples, every: 4, prompt: '3 sheep', tokens: 5}",
    "description=a <b>small</b> run",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def test_many_numbers_of_an_evaluation_fit_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    numbers = {f"val.of_{number}.accuracy": 0.5 for number in range(7)}
    TrainingProgress(float, quiet=False).on_eval(cast(Training, SimpleNamespace(step=4)), numbers)
    lines = capsys.readouterr().err.splitlines()
    assert max(map(len, lines)) <= 80
    assert " ".join("".join(lines).split()) == "step 4 " + " ".join(f"{name} 0.5000" for name in numbers)


def test_tokens_per_second_are_those_of_the_steps_of_this_process() -> None:
    """Also if the batches of later steps have more tokens."""
    before = {1: 0, 2: 10, 3: 30, 4: 70, 5: 150}
    progress = TrainingProgress(before.__getitem__, quiet=True)
    training = SimpleNamespace(step=1)
    progress.on_start(cast(Training, training))
    for training.step in (2, 3):
        progress.on_step(cast(Training, training), {})
    progress.seconds = 0.5
    assert progress.tokens_per_second == 120


@pytest.mark.parametrize(("rank", "quiet"), [(None, False), (0, False), (1, True)])
def test_the_first_of_several_processes_prints_notes(
    rank: int | None, quiet: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments: list[bool] = []

    def load(reader: object, name: str, *, quiet: bool) -> None:
        arguments.append(quiet)
        raise InterruptedError

    monkeypatch.setattr(command, "_load_run", load)
    launched = None if rank is None else SimpleNamespace(rank=rank, count=2)
    with pytest.raises(InterruptedError):
        command._train_in_process(
            cast(Any, None), "small.yaml", None, None, cast(Any, launched), allow_change=False, json=False
        )
    assert arguments == [quiet]


PLAN = Plan(
    name="small",
    digest="0123456789abcdef",
    parameters=12_345,
    trained=678,
    steps=901,
    tokens=2_345_678,
    padding=9_012,
    epochs=3.25,
    flops=4 * 10**12,
    flops_of_evaluations=5 * 10**9,
    memory=6 << 20,
    seconds=7.0,
    float8="rowwise, 8 of 9 matrices of layers",
    rates=((1, 0.001), (901, 0.0025)),
    groups=(
        SettingsGroup("hidden", 10, 1100, 0.012, 0.13, 1e-8, (0.014, 0.015)),
        SettingsGroup("fixed", 16, 1700, 0.018, 0.19, None, None),
    ),
    growth={"decoder": {"width": 4.0, "depth": 2.5}},
    factors={"graph.head.scale": 0.25},
)


def test_each_number_of_a_plan_stands_in_its_row(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    command._show_plan(PLAN, {"test.constant_accuracy": 0.5625})
    short = replace(PLAN, trained=None, padding=0, flops_of_evaluations=0, seconds=None, float8=None, groups=())
    command._show_plan(short, {})
    golden("runs/plan", capsys.readouterr().out)


def test_each_number_of_a_run_stands_in_its_row(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan, "device_of_run", lambda run: None)
    monkeypatch.setattr(plan, "device_utilisation", lambda *arguments: Utilisation(causal=0.25, full=0.5))
    monkeypatch.setattr(plan, "padding_of", lambda run: 0.125)
    history = History({"loss": [(1, 3.5), (901, 2.25)], "val.loss": [(901, 2.75)]}, [])
    command._show_result(Trained(Path("out"), 901, "finished", history, 4, 8000.0), cast(Any, None), json=False)
    golden("runs/trained", capsys.readouterr().out)


def test_python_trains_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    part = tfkit.train("small.yaml", output="out", sets=SETS, stop_after=5)
    assert (part.ended, part.step, part.steps_made) == ("interrupted", 5, 5)
    assert "val.loss" in capsys.readouterr().err
    uninterrupted = tfkit.train("out", quiet=True)
    assert capsys.readouterr().err == ""
    assert (uninterrupted.ended, uninterrupted.step, uninterrupted.steps_made) == ("finished", 8, 3)
    words = [word for change in SETS for word in ("--set", change)]
    assert main(["train", "small.yaml", "-o", "command", *words]) == 0
    assert Path("out/metrics.jsonl").read_bytes() == Path("command/metrics.jsonl").read_bytes()
    again = tfkit.train("out")
    assert (again.ended, again.steps_made, again.tokens_per_second) == ("finished", 0, None)
    assert again.history == uninterrupted.history
    assert [step for step, _ in uninterrupted.history.curves["loss"]] == [*range(1, 9)]
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert uninterrupted.history.latest["val.loss"] == lines[-1]["val.loss"]
    assert [(step, name) for step, name, _ in uninterrupted.history.texts] == [(4, "sample"), (8, "sample")]
    assert tfkit.build(uninterrupted.folder).embedding.tokens.weight.shape == (27, 16)


def test_a_mapping_is_a_run() -> None:
    actual = tfkit.train(yaml.safe_load(RUN), sets={"steps": 2, "model.decoder.n_layers": 1}, quiet=True)
    assert actual.folder.parent == Path("runs")
    assert actual.folder.name.startswith("small-")
    assert json.loads((actual.folder / "run.json").read_text(encoding="utf-8"))["meaning"]["steps"] == 2
    with pytest.raises(SpecError, match="`stesp`"):
        tfkit.train(yaml.safe_load(RUN) | {"stesp": 3})


def test_python_evaluates_what_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    tfkit.train("small.yaml", output="out", quiet=True)
    assert main(["eval", "out", "--split", "train", "--metric", "accuracy", "--metric", "loss", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["out"]
    actual = tfkit.evaluate("out", splits=["train"], metrics=["accuracy", "loss"])
    assert actual == report
    assert actual == tfkit.evaluate("small.yaml", splits=["train"], metrics=["accuracy", "loss"], weights="out/step-8")
    for options, words in (({"splits": ["vla"]}, "no split `vla`"), ({"metrics": ["acuracy"]}, "`accuracy`")):
        with pytest.raises(SpecError, match=words):
            tfkit.evaluate("out", **options)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="has no weights to evaluate"):
        tfkit.evaluate("small.yaml")
    with pytest.raises(SpecError, match="there is no run `outt`"):
        tfkit.evaluate("outt")


def test_an_evaluation_of_a_folder_is_the_last_one_of_its_run() -> None:
    sets = ["steps=2", "precision=bfloat16", "eval={every: 2, splits: {val: all}, metrics: [loss, accuracy]}"]
    done = tfkit.train("small.yaml", output="out", sets=sets, quiet=True)
    latest = done.history.latest
    assert tfkit.evaluate("out") == {name: latest[name] for name in ("val.loss", "val.accuracy")}


def test_the_page_of_a_run() -> None:
    tfkit.train("small.yaml", output="out", sets=SETS, stop_after=5, quiet=True)
    assert "interrupted after step 5 of 8" in Path("out/report.html").read_text(encoding="utf-8")
    tfkit.train("out", quiet=True)
    text = Path("out/report.html").read_text(encoding="utf-8")
    assert "finished after step 8 of 8" in text
    assert re.findall(r'<section id="(\w+)"', text) == ["numbers", "texts", "model", "run", "origin"]
    assert re.findall(r'aria-label="(\w+) over', text) == ["loss", "accuracy", "lr", "grad_norm"]
    for words in ("val.accuracy", "sample, step 4", "causal self-attention", "kind: adamw", "tfkit.train"):
        assert words in text
    assert "a &lt;b&gt;small&lt;/b&gt; run" in text
    text, script, end = re.split(r"(?<=<script>)(.*)(?=</script>)", text, flags=re.DOTALL)
    assert script == (files("tfkit.tools.common") / "curves.js").read_text(encoding="utf-8")
    text = text.removesuffix("<script>") + end
    assert not re.search(r"<script|https?://(?!www\.w3\.org/2000/svg)|@import|url\(", text.partition("</head>")[2])
    assert len(text) < 200_000


def test_the_page_has_the_last_texts() -> None:
    texts = [(3 * number, "sample", f"text {number}") for number in range(LAST_TEXTS + 7)]
    tags = [*_text_contents(History({}, texts))]
    assert [tag.text for tag in tags] == [
        words for step, name, text in texts[7:] for words in (f"{name}, step {step}", text)
    ]


def test_a_run_that_diverged_is_not_trained_again(capsys: pytest.CaptureFixture[str]) -> None:
    """Its folder has the fact, its error says the cause again, and a checkpoint before it stays."""
    wild = ["train", "small.yaml", "-o", "out", "--set", "optimizer.lr=1e18", "--set", "checkpoint.every=1"]
    assert main(wild) == 1
    first = capsys.readouterr().err
    assert "error: step 2 has a loss or a gradient that is not finite: " in first
    facts = json.loads(Path("out/run.json").read_text(encoding="utf-8"))
    assert (facts["ended"], facts["sessions"][-1]["ended"], facts["sessions"][-1]["step"]) == ("diverged",) * 2 + (1,)
    files = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    assert "diverged after step 1 of 8" in Path("out/report.html").read_text(encoding="utf-8")
    assert main(wild) == 1
    again = capsys.readouterr().err
    assert again.startswith("error: the run in `out` diverged after step 1\n")
    assert "step 2 has a loss or a gradient that is not finite: " in again
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == files
    assert Path("out/step-1").is_dir()
    with pytest.raises(SpecError, match="the run in `out` diverged after step 1"):
        tfkit.train("out", quiet=True)
    assert tfkit.train("small.yaml", output="skipped", sets={"nonfinite.skip": 9, "steps": 2}, quiet=True).step == 2


@pytest.mark.parametrize(
    ("line", "error"),
    {
        "[1]": "line 1: its JSON is not an object",
        '{"loss": 1}': "line 1: it has no `step`",
        '{"step": true, "loss": 1}': "line 1: it has no `step`",
        '{"step": 1, "loss": [1]}': "line 1: `loss` must be a number or a text",
        '{"step": 1, "loss": null}': "line 1: `loss` must be a number or a text",
        "[" * 100_000: "line 1: its JSON is nested too deeply",
    }.items(),
    ids=lambda text: text[:30],
)
def test_numbers_that_cannot_be_read_are_one_error(line: str, error: str) -> None:
    Path("metrics.jsonl").write_text(f"{line}\n", encoding="utf-8")
    with pytest.raises(SpecError, match=re.escape(error)):
        read_history(Path())


def test_a_long_curve_keeps_its_extremes() -> None:
    points = [(step, float(step % 7)) for step in range(1, 10_001)]
    drawn = _binned_points(points)
    assert len(drawn) <= MAX_POINTS
    assert drawn[-1][0] == 10_000
    assert [value for _, values in drawn for value in values] == [value for _, value in points]


def test_numbers_that_are_not_finite_have_no_place_in_a_curve(tmp_path: Path) -> None:
    lines = ['{"step": 1, "loss": NaN}', '{"step": 2, "loss": 1.5}', '{"step": 2, "skipped": "the weight"}']
    (tmp_path / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    actual = read_history(tmp_path)
    assert actual.curves == {"loss": [(2, 1.5)]}
    assert actual.texts == [(2, "skipped", "the weight")]


def test_warnings_of_plugins_about_the_model(capsys: pytest.CaptureFixture[str]) -> None:
    experts = "{kind: moe, n_experts: 4, n_experts_per_token: 1, d_ff: 8, router: {order: topk_then_score}}"
    assert main(["train", "small.yaml", "--plan", "--set", f"model.graph.decoder.ffn={experts}"]) == 0
    errors = capsys.readouterr().err
    assert "warning: the router learns nothing from the loss of the model" in errors
    assert "from the plugin tfkit-moe" in errors

"""A sweep trains missing runs once, and compares all runs."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tfkit.cli import main
from tfkit.tools.sweep import tuning as tuning_module
from tfkit.tools.sweep.scaling import law_of

from ...run.training.runs import BUMP
from ...sampling import slow
from .small import MEMORY, SWEEP, TUNE, drawn, result, sweep, write

pytestmark = pytest.mark.usefixtures("here")


def planned(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The rows of the plan."""
    capsys.readouterr()
    assert sweep("--plan", "--json") == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    return rows


def test_a_sweep_makes_what_is_missing(
    capsys: pytest.CaptureFixture[str], new_folders: list[str], finished: list[str]
) -> None:
    assert len(finished) == len(set(finished)) == 6  # `again` is `relu`, and has its runs
    actual = result(capsys)
    assert new_folders == []
    relu, again, gelu = actual["arms"]
    assert gelu["memory"] == MEMORY
    assert again["difference"]["mean"] == 0
    assert again["difference"]["interval"] is None  # of three seeds
    assert again["reached"]["ratio"] == 1
    assert again["verdict"] == gelu["verdict"] == "open"
    for arm in (relu, gelu):
        for curve in arm["curves"]:
            lines = Path(curve["folder"], "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            numbers = [json.loads(line) for line in lines]
            assert curve["values"] == [number["val.loss"] for number in numbers if "val.loss" in number]
            assert curve["steps"] == [0, 4, 8]
    last = [[curve["values"][-1] for curve in arm["curves"]] for arm in (gelu, relu)]
    assert gelu["difference"]["mean"] == pytest.approx(sum(a - b for a, b in zip(*last, strict=True)) / 3)
    assert result(capsys) == actual
    write(SWEEP.replace("  gelu:", "  silu: {model.decoder.ffn.kind: silu}\n  gelu:").replace("[0, 1, 2]", "[0, 1]"))
    assert len(result(capsys)["arms"]) == 4
    assert len(new_folders) == 2
    assert sweep("--set", "machine.threads=2") == 0
    assert len(new_folders) == 2


@pytest.mark.parametrize(("options", "more"), [((), ""), (("--so-far",), ""), (("--plan",), "equal: {params: 0%}\n")])
def test_a_folder_that_cannot_be_written_is_one_error(
    options: tuple[str, ...], more: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file has the name of the folder around it."""
    Path("out").touch()
    write(SWEEP.replace("model.decoder.ffn.kind: gelu", "model.decoder.ffn: {kind: swiglu, d_ff: 9}") + more)
    assert main(["sweep", "sweep.yaml", "-o", "out/sweep", *options, "--no-plugins"]) == 1
    error = capsys.readouterr().err
    assert error.count("error: ") == 1
    assert error.splitlines()[-1].startswith("error: cannot ")


def test_a_missing_scipy_is_an_error_before_a_run_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "scipy", None)
    write(SWEEP)
    assert sweep() == 1
    assert 'pip install "tfkit[train]"' in capsys.readouterr().err
    assert not Path("out/runs").exists()


def test_a_run_with_another_default_is_not_taken_and_not_touched(
    capsys: pytest.CaptureFixture[str], finished: list[str]
) -> None:
    facts = Path("out/runs", finished[-1], "run.json")
    text = facts.read_text(encoding="utf-8")
    facts.write_text(text.replace('"optimizer.eps": 1e-08', '"optimizer.eps": 1e-06'), encoding="utf-8")
    before = {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")}
    assert sweep() == 1
    assert f"`out/runs/{finished[-1]}` has a different run" in (message := capsys.readouterr().err)
    assert "optimizer.eps: 1e-06 -> 1e-08" in message
    assert {path: path.stat().st_mtime_ns for path in Path("out").rglob("*")} == before


def test_the_best_value_of_tuning_is_taken_and_its_edge_is_said(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    new_folders: list[str],
    finished: list[str],
) -> None:
    write(SWEEP + TUNE)
    read, curve_of = list[Path](), tuning_module.curve_of
    monkeypatch.setattr(tuning_module, "curve_of", lambda run, on: read.append(run.folder) or curve_of(run, on))
    actual = result(capsys)
    assert len(read) == len(set(map(str, read))) * 3 / 2 == 3 * 2  # `relu` and `again` share their runs
    assert len(new_folders) == 2 * 2  # the best value is that of the runs that are there
    assert [arm["tuned"]["values"] for arm in actual["arms"]] == [{"optimizer.lr": 1e-2}] * 3
    assert "relu is not tuned: its best optimizer.lr, 0.01, is at the edge of the tried values" in actual["notes"]
    assert [(trial["arm"], trial["words"], trial["best"]) for trial in actual["trials"]] == [
        (arm, f"lr {rate}", rate == 1e-2) for arm in ("relu", "again", "gelu") for rate in (1e-6, 1e-2)
    ]
    assert "<h2>Tuning</h2>" in Path("out/report.html").read_text(encoding="utf-8")
    assert sweep("--plan") == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[2][:5] == ["relu,", "tuning", "5.5K", "2", "2"]
    assert rows[7][:4] == ["gelu", "5.5K", "3", "3"]
    for name in finished:
        shutil.rmtree(Path("out/runs", name))
    tuning, runs, *_ = planned(capsys)
    assert (tuning["done"], runs["done"]) == (2, 0)
    assert runs["seconds"] / runs["steps"] == pytest.approx(tuning["seconds"] / tuning["steps"])
    write(SWEEP + TUNE.replace("1e-2]", "1e-2, 10]"))
    assert not any("not tuned" in note for note in result(capsys)["notes"])


WILD = SWEEP.replace("  gelu:", "  wild: {optimizer.lr: 1e18}\n  gelu:").replace("[0, 1, 2]", "[0, 1]")


def test_a_diverged_run_is_a_result(
    capsys: pytest.CaptureFixture[str], new_folders: list[str], finished: list[str]
) -> None:
    """It is counted, nothing is trained again, and the seeds that are left give no verdict."""
    write(WILD)
    assert sweep() == 0
    assert re.search(r"^wild +- +2 +- +- +- +diverged 2/2$", capsys.readouterr().out, re.MULTILINE)
    assert len(new_folders) == 2
    assert {json.loads(Path("out/runs", name, "run.json").read_text())["ended"] for name in new_folders} == {"diverged"}
    report = result(capsys)
    assert len(new_folders) == 2
    relu, _, wild, gelu = report["arms"]
    assert (wild["mean"], wild["difference"], wild["verdict"]) == (None, None, "diverged")
    assert [curve["seed"] for curve in wild["diverged"]] == [0, 1]
    assert gelu["difference"]["p"] == gelu["difference"]["adjusted"] == 0.5
    assert relu["verdict"] is None
    assert "wild diverged on seeds 0, 1" in report["notes"]
    assert not [note for note in report["notes"] if "left out" in note or "no pair" in note]
    page = Path("out/report.html").read_text(encoding="utf-8")
    assert page.count("<td>diverged</td>") == 2
    Path("out/runs", new_folders[1], "run.json").unlink()
    assert result(capsys, "--so-far")["arms"][2]["verdict"] == "diverged"


def test_a_run_that_ends_before_its_first_step_has_no_speed(
    capsys: pytest.CaptureFixture[str], new_folders: list[str]
) -> None:
    write(SWEEP.replace("[0, 1, 2]", "[0]"))
    goal = ("--set", "callbacks={kind: stop_at, below: 100}")
    assert sweep(*goal) == 0
    assert len(new_folders) == 2
    assert "ended at step 0 of 8" in capsys.readouterr().out
    assert sweep(*goal, "--plan") == 0


def test_nothing_is_compared_to_a_baseline_that_diverged(
    capsys: pytest.CaptureFixture[str], new_folders: list[str], finished: list[str]
) -> None:
    facts = next(
        p for p in Path("out/runs").glob("*/run.json") if "relu" in (text := p.read_text()) and '"seed": 1' in text
    )
    facts.write_text(facts.read_text().replace('"ended": "finished"', '"ended": "diverged"'))
    write(SWEEP.replace("  again: {model: {graph: {decoder: {ffn: {kind: relu}}}}}\n", ""))
    report = result(capsys)
    assert new_folders == []
    assert [arm["verdict"] for arm in report["arms"]] == ["diverged", None]
    assert report["arms"][1]["difference"] is None
    assert report["arms"][1]["mean"] is not None
    assert "relu diverged on seed 1; the remaining seeds alone give no verdict" in report["notes"]
    assert "gelu: no difference, because relu diverged" in report["notes"]


def test_a_metric_that_is_not_finite_is_not_left_out(capsys: pytest.CaptureFixture[str], finished: list[str]) -> None:
    """The loss of a finished run may overflow on other data than the data of its steps."""
    numbers = next(p for p in Path("out/runs").glob("*/run.json") if "gelu" in p.read_text()).with_name("metrics.jsonl")
    (*lines, last) = numbers.read_text().splitlines()
    numbers.write_text("\n".join([*lines, re.sub(r'"val.loss": [\d.]+', '"val.loss": NaN', last)]) + "\n")
    gelu = result(capsys)["arms"][2]
    assert (gelu["verdict"], len(gelu["curves"]), len(gelu["diverged"])) == ("diverged", 2, 1)


@pytest.mark.slow
def test_a_trial_that_diverges_loses_and_is_made_once(
    capsys: pytest.CaptureFixture[str], new_folders: list[str], finished: list[str]
) -> None:
    write(SWEEP + TUNE.replace("1e-2]", "1e-2, 1e18]"))
    report = result(capsys)
    assert len(new_folders) == 2 * 3
    assert [arm["tuned"]["values"] for arm in report["arms"]] == [{"optimizer.lr": 1e-2}] * 3
    wild = [trial for trial in report["trials"] if trial["words"] == "lr 1e+18"]
    assert [(trial["mean"], trial["runs"], trial["diverged"]) for trial in wild] == [(None, 1, 1)] * 3
    assert not any("tuned" in note for note in report["notes"])
    assert sweep() == 0
    assert re.search(r"^gelu +lr 1e\+18 +diverged 1/1$", capsys.readouterr().out, re.MULTILINE)
    assert len(new_folders) == 2 * 3
    write(SWEEP + TUNE.replace("[1e-6, 1e-2]", "[1e18]"))
    assert "gelu is not tuned: every trial diverged" in result(capsys)["notes"]
    assert len(new_folders) == 2 * 3


SEARCH = """\
tfkit: 1
base: small.yaml
seeds: [0]
tune: {over: {optimizer.lr: {log: [1e-4, 1e-1]}, clip: [0.5, null]}, search: {trials: 5, seed: 3}, seeds: [9], steps: 2}
compare: {on: val.loss}
"""


@pytest.mark.slow
def test_a_search_asks_for_the_same_trials_again(capsys: pytest.CaptureFixture[str], new_folders: list[str]) -> None:
    """So a second call makes nothing, and an interrupted search goes on where it was."""
    pytest.importorskip("optuna")
    write(SEARCH)
    assert sweep("--plan") == 0
    assert "6 different runs, 6 to train" in capsys.readouterr().out
    actual = result(capsys)
    (arm,) = actual["arms"]
    trials = new_folders[:5]
    assert len(set(new_folders)) == 6
    values = {}
    for name in trials:
        lines = Path("out/runs", name, "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        meaning = json.loads(Path("out/runs", name, "run.json").read_text())["meaning"]
        values[json.loads(lines[-1])["val.loss"]] = meaning["optimizer.lr"]
    assert arm["tuned"]["values"]["optimizer.lr"] == values[min(values)]
    assert {trial["mean"]: trial["values"]["optimizer.lr"] for trial in actual["trials"]} == values
    assert [trial["mean"] for trial in actual["trials"] if trial["best"]] == [min(values)]
    assert len(set(values.values())) == 5
    assert all(1e-4 <= trial <= 1e-1 for trial in values.values())
    new_folders.clear()
    assert result(capsys) == actual
    assert new_folders == []
    for name in trials[3:]:
        shutil.rmtree(Path("out/runs", name))
    assert sweep("--so-far") == 0
    assert "base is not tuned yet" in (text := capsys.readouterr().out)
    assert "verdict" not in text
    assert [line.split()[-1] for line in text.splitlines() if line.split()[:2] == ["base", "lr"]] == [
        *(f"{trial['mean']:.4f}" for trial in actual["trials"][:3]),
        "-",
    ]
    assert result(capsys)["arms"][0]["tuned"] == arm["tuned"]
    assert new_folders == trials[3:]


@pytest.mark.slow
@pytest.mark.parametrize(("sampler", "trials"), [("tpe", 5), slow(("gp", 12))])
def test_a_trial_of_a_search_that_diverges_is_not_the_best(
    sampler: str, trials: int, capsys: pytest.CaptureFixture[str], new_folders: list[str]
) -> None:
    """`gp` fits the results of trials after its first ten."""
    pytest.importorskip("optuna")
    search = f"trials: {trials}, sampler: {sampler}"
    write(SEARCH.replace("[1e-4, 1e-1]", "[1e-4, 1e18]").replace("trials: 5", search))
    report = result(capsys)
    assert report["arms"][0]["tuned"]["values"]["optimizer.lr"] < 1e3
    assert None in [trial["mean"] for trial in report["trials"]]
    assert [trial["diverged"] for trial in report["trials"]] == [trial["mean"] is None for trial in report["trials"]]
    assert result(capsys) == report
    assert len(new_folders) == trials + 1


def test_without_optuna_the_error_says_so(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    write(SEARCH)
    assert sweep() == 1
    assert "a search needs `optuna`" in capsys.readouterr().err


LADDER = """\
tfkit: 1
base: small.yaml
sizes: {params: [4k, 8k, 16k, 32k]}
tokens: params / 80
seeds: [0, 1]
compare: {on: val.loss}
fit: {on: params}
"""


@pytest.mark.slow
def test_a_ladder_of_sizes_has_a_law(capsys: pytest.CaptureFixture[str], new_folders: list[str]) -> None:
    write(LADDER)
    actual = result(capsys)
    assert len(new_folders) == 8
    (fitted,) = actual["laws"]
    assert fitted["sizes"] == [arm["parameters"] for arm in actual["arms"]]
    assert fitted["losses"] == [[curve["values"][-1] for curve in arm["curves"]] for arm in actual["arms"]]
    law = law_of(fitted["sizes"], fitted["losses"])
    assert [law.floor, law.scale, law.exponent] == [fitted["law"][name] for name in ("floor", "scale", "exponent")]
    page = Path(actual["page"]).read_text(encoding="utf-8")
    assert drawn(page) == (["curves", "scaling laws"], 1)
    assert "val.loss: differences" not in page  # there is nothing to compare
    assert sweep("--so-far") == 0
    assert re.search(r"^base +E +\d.*\.\.", capsys.readouterr().out, re.MULTILINE)
    assert len(new_folders) == 8


@pytest.mark.parametrize("sizes", ["[4k, 8k]", slow("[4k, 8k, 16k, 32k]}\ngrid: {optimizer.lr: [1e-3, 1e-2]")])
def test_what_a_law_needs(sizes: str, capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    write(LADDER.replace("[4k, 8k, 16k, 32k]", sizes))
    assert sweep("--plan") == 1
    golden(f"sweeps/errors/law_{len(sizes)}", capsys.readouterr().err)


def test_commands_train_the_missing_runs_alone(finished: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert sweep("--commands") == 0
    assert capsys.readouterr().out == ""
    shutil.rmtree(Path("out/runs") / finished[1])
    assert sweep("--commands") == 0
    printed = capsys.readouterr()
    assert printed.out == f"tfkit train out/runs/{finished[1]} --no-plugins\n"
    assert printed.err == "1 run is missing; then compare the runs without --commands\n"
    assert main(shlex.split(printed.out)[1:]) == 0
    assert sweep("--commands") == 0
    assert capsys.readouterr().err.endswith("0 runs are missing; then compare the runs without --commands\n")
    write(SWEEP + TUNE)
    assert sweep("--commands") == 0
    printed = capsys.readouterr()
    assert len(printed.out.splitlines()) == 2 * 2
    assert printed.err.endswith("then print the commands of the next runs with --commands\n")
    assert sweep("--commands", "--jobs", "2") == 2
    assert "--commands cannot be combined with --jobs" in capsys.readouterr().err


def test_the_command_in_an_error_runs_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    """Also with a plugin that only an option loads."""
    Path("bump.py").write_text(BUMP, encoding="utf-8")
    wide = "variants: {narrow: {}, wide: {model.decoder.ffn: {kind: mlp, activation: bump, d_ff: 90}}}"
    write(f"tfkit: 1\nbase: small.yaml\n{wide}\nseeds: [0]\nequal: {{params: 1%}}\ncompare: {{on: val.loss}}\n")
    assert main(["sweep", "sweep.yaml", "-o", "out", "--plugin-dir", "bump.py"]) == 1
    (command,) = re.findall("`(tfkit solve [^`]*)`", " ".join(capsys.readouterr().err.split()))
    assert main(shlex.split(command)[1:]) == 0
    assert " near " in capsys.readouterr().out.splitlines()[0]

"""Runs from folders are compared as their sweep compares them, or rejected."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from tests.run.training.runs import PLUGINS
from tests.tools.sweep.in_process import InProcess
from tests.tools.sweep.small import SWEEP, drawn, sweep, write, write_files
from tfkit.cli import main
from tfkit.run.checked_run import load_run
from tfkit.run.run_spec import render_run
from tfkit.run.training import memory
from tfkit.spec.folder import FACTS, RUN
from tfkit.tools.common.history import METRICS
from tfkit.tools.runs.variants import run_variants
from tfkit.tools.sweep import sweep as module
from tfkit.tools.sweep.arms import SweepRun

from ...sampling import some

RELU, GELU = ("relu-0", "relu-1", "relu-2"), ("gelu-0", "gelu-1", "gelu-2")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with the runs of a sweep under names of their own, and what the sweep says of them."""
    folder = tmp_path_factory.mktemp("runs")
    write_files(folder)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        patched.setattr(module, "train_missing_runs", InProcess())
        patched.setattr(memory, "peak_memory", lambda device: 2**28)
        write(re.sub("  again: .*\n", "", SWEEP))
        with redirect_stdout(StringIO()) as printed:
            assert sweep("--json") == 0
    report: dict[str, Any] = json.loads(printed.getvalue())
    for arm in report["arms"]:
        for curve in arm["curves"]:
            (folder / curve["folder"]).rename(folder / f"{arm['name']}-{curve['seed']}")
    return folder, report


@pytest.fixture
def here(swept: tuple[Path, dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A copy of it to stand in; the sweep's own results."""
    shutil.copytree(swept[0], tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob(f"*/{RUN}"):
        path.write_text(path.read_text().replace(str(swept[0]), str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    return swept[1]


def change(folder: str, *sets: str) -> None:
    """Make a folder that of another run."""
    run = load_run(folder, PLUGINS, sets=sets)
    Path(folder, RUN).write_text(render_run(run.config, run.graph.spec), encoding="utf-8")
    facts = json.loads(Path(folder, FACTS).read_text()) | {"digest": run.digest, "meaning": run.semantics.values}
    Path(folder, FACTS).write_text(json.dumps(facts))


def unfinish(folder: str, lines: int, *, more: str = "") -> None:
    """Leave a folder as a process does that still trains."""
    facts = json.loads(Path(folder, FACTS).read_text()) | {"ended": None}
    Path(folder, FACTS).write_text(json.dumps(facts))
    lines_before = Path(folder, METRICS).read_text().splitlines(keepends=True)[:lines]
    Path(folder, METRICS).write_text("".join(lines_before) + more)


def comparison(run: Callable[..., str], *arguments: str) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(run("runs", *arguments, "--json", stderr=False))
    return result


def without_names(results: dict[str, Any]) -> list[dict[str, Any]]:
    """What a comparison says of each arm but for its folders."""
    return [{**arm, "curves": [{**curve, "folder": ""} for curve in arm["curves"]]} for arm in results["arms"]]


def test_the_numbers_are_those_of_the_sweep(run: Callable[..., str], here: dict[str, Any]) -> None:
    local = comparison(run, *RELU, *GELU)
    assert without_names(local) == without_names(here)
    assert local["notes"] == here["notes"]
    values = [np.array([curve["values"][-1] for curve in arm["curves"]]) for arm in local["arms"]]
    difference = local["arms"][1]["difference"]
    assert difference["interval"] is None  # three seeds cannot reject any difference
    signs = stats.permutation_test((values[1] - values[0],), np.mean, permutation_type="samples")
    assert difference["p"] == pytest.approx(signs.pvalue)
    assert [
        (difference["path"], difference["before"], difference["after"]) for difference in local["differing"]["gelu"]
    ] == [
        ("graph.decoder.ffn", "relu", "gelu"),
        ("graph.decoder.ffn.approximate", None, "none"),
    ]


def test_the_baseline_is_the_first_or_a_named_one(run: Callable[..., str], here: dict[str, Any]) -> None:
    mean = here["arms"][1]["difference"]["mean"]
    other = comparison(run, *RELU, *GELU, "--baseline", "gelu-1")
    assert [arm["base"] for arm in other["arms"]] == ["gelu", "gelu"]
    assert [arm["name"] for arm in other["arms"]] == ["gelu", "relu"]
    assert other["arms"][1]["difference"]["mean"] == pytest.approx(-mean)
    assert comparison(run, "gelu-2", *RELU, "gelu-0", "gelu-1")["arms"][1]["difference"]["mean"] == pytest.approx(-mean)


def test_more_is_better_where_one_says_so(run: Callable[..., str], here: dict[str, Any]) -> None:
    del here
    assert comparison(run, *RELU, *GELU, "--better", "higher")["lower"] is False


# ---- names ----


def named(*sets: tuple[str, ...]) -> list[str]:
    runs = [load_run("small.yaml", PLUGINS, sets=overrides) for overrides in sets]
    return [
        variant.name for variant in run_variants(SweepRun(run, Path(str(number))) for number, run in enumerate(runs))
    ]


def test_runs_whose_mappings_have_another_order_are_one_variant(here: dict[str, Any]) -> None:
    del here
    splits = ("eval.splits={val: all, train: 2}",), ("eval.splits={train: 2, val: all}", "seed=5")
    assert len(named(*splits)) == 1


FFN = "model.decoder.ffn"
RATE = "optimizer.lr=0.003"


@pytest.mark.parametrize(
    ("sets", "names"),
    some(
        [
            ([(), ("seed=7",)], ["small"]),
            ([(), (RATE,)], ["lr 0.01", "lr 0.003"]),
            ([(), (f"{FFN}={{kind: swiglu, d_ff: 20}}",)], ["relu", "swiglu"]),
            ([(), (f"{FFN}.kind=gelu",), (RATE,)], ["relu, lr 0.01", "gelu", "lr 0.003"]),
            ([(f"{FFN}.kind=gelu", RATE), (), (RATE,)], ["gelu, lr 0.003", "relu, lr 0.01", "relu"]),
            ([(), ("model.decoder.attention.qk_norm=rmsnorm",)], ["qk_norm none", "qk_norm rmsnorm"]),
            (
                [(), ("model.decoder.attention.qk_norm=rmsnorm", RATE), (RATE,)],
                ["lr 0.01", "qk_norm rmsnorm, lr 0.003", "lr 0.003"],
            ),
            ([(), ("clip=1.0",)], ["clip null", "clip 1.0"]),
            ([(), ("optimizer.betas=[0.9, 0.95]",)], ["betas.1 0.999", "betas.1 0.95"]),
            ([(), ("model.d_model=32",)], ["d_model 16", "d_model 32"]),
        ],
        5,
    ),
)
def test_a_variant_is_named_by_what_tells_it_apart(
    here: dict[str, Any], sets: list[tuple[str, ...]], names: list[str]
) -> None:
    del here
    assert named(*sets) == names


# ---- what cannot be compared ----


@pytest.mark.parametrize(
    ("name", "other", "options"),
    some(
        [
            ("no_run", (), ("nowhere", ".", "out", *RELU)),
            ("number", (), (*RELU, "--on", "val.bits_per_byte")),
            ("baseline", (), (*RELU, "--baseline", "gelu-0")),
            ("margin", (), ("relu-0", "--margin", "0.1")),
            ("data", ("data.split={train: 0.8, val: 0.2}",), ("relu-0", "gelu-0")),
            ("twice", (), (*RELU, "relu-0/")),
            ("length", ("batch.length=8",), ("relu-0", "gelu-0")),
            ("batches", ("eval.splits.val.batches=3",), ("relu-0", "gelu-0")),
            ("sequences", ("batch.sequences=4",), ("relu-0", "gelu-0")),
        ],
        4,
    ),
)
def test_what_cannot_be_compared(
    run: Callable[..., str],
    golden: Callable[[str, str], None],
    here: dict[str, Any],
    name: str,
    other: tuple[str, ...],
    options: tuple[str, ...],
) -> None:
    del here
    if other:
        change("gelu-0", *other)
    text = run("runs", *options, status=1, stderr=True)
    golden(f"runs/compared/{name}", re.sub(r"\b[0-9a-f]{8}\b", "<digest>", text))


def test_what_only_training_depends_on_is_compared(run: Callable[..., str], here: dict[str, Any]) -> None:
    del here
    for folder in GELU:
        change(folder, "data.order=sampled")
    assert comparison(run, *RELU, *GELU)["arms"][1]["difference"]["pairs"] == 3


def test_a_folder_whose_data_changed_is_refused(run: Callable[..., str], here: dict[str, Any]) -> None:
    del here
    with Path("sheep.txt").open("a") as file:
        file.write("3 sheep\n")
    assert "the data of the run in `relu-0` has changed" in run("runs", *RELU, status=1, stderr=True)


def test_wrong_usage(run: Callable[..., str]) -> None:
    assert "add --better" in run("runs", "a", "--on", "val.accuracy", status=2, stderr=True)
    assert "only one of" in run("runs", "a", "--latex", "--json", status=2, stderr=True)


# ---- what is said ----


def test_seeds_without_a_pair_and_other_lengths_are_said(run: Callable[..., str], here: dict[str, Any]) -> None:
    change("gelu-1", "steps=12")
    local = comparison(run, *RELU, "gelu-2", "gelu-1")
    assert [arm["name"] for arm in local["arms"]] == ["relu, steps 8", "gelu", "gelu, steps 12"]
    assert local["notes"] == [
        "seeds 0, 1 of relu, steps 8 have no pair in gelu: for the mean alone",
        "seeds 0, 2 of relu, steps 8 have no pair in gelu, steps 12: for the mean alone",
        "1 seed, but a verdict needs at least 6",
        "gelu, steps 12 has 864 tokens, 50.00% more than the 576 of relu, steps 8",
        "gelu, steps 12, seed 1, ended at step 8 of 12",
    ]
    assert [arm["verdict"] for arm in local["arms"]] == [None, None, None]
    last = [here["arms"][arm]["curves"][2]["values"][-1] for arm in (1, 0)]
    assert local["arms"][1]["difference"]["mean"] == last[0] - last[1]


def test_an_unfinished_run_is_left_out_unless_asked_for(run: Callable[..., str], here: dict[str, Any]) -> None:
    unfinish("gelu-1", 7, more='{"step": 7, "lo')  # a process is writing
    local = comparison(run, *RELU, *GELU)
    assert local["arms"][1]["difference"]["pairs"] == 2
    assert "`gelu-1` is omitted: it is not finished" in local["notes"]
    local = comparison(run, *RELU, *GELU, "--so-far")
    assert [curve["steps"] for arm in local["arms"] for curve in arm["curves"]] == [[0, 4]] * 6
    values = [[curve["values"][1] for curve in arm["curves"]] for arm in here["arms"]]
    assert local["arms"][1]["difference"]["mean"] == pytest.approx(np.mean(np.subtract(*values[::-1])))
    assert local["notes"][-1] == "not finished: `gelu-1`; all numbers are from step 4, the last step of all runs"
    assert without_names(comparison(run, *RELU, "--so-far")) == without_names(comparison(run, *RELU))


def diverge(folder: str) -> None:
    """Leave a folder as a process does whose run diverged after its last step."""
    facts = json.loads(Path(folder, FACTS).read_text()) | {"ended": "diverged"}
    Path(folder, FACTS).write_text(json.dumps(facts))


def test_a_diverged_run_is_a_result(run: Callable[..., str], here: dict[str, Any]) -> None:
    """It is not left out as if it were unfinished, and the remaining seeds give no verdict."""
    diverge("gelu-1")
    report = comparison(run, *RELU, *GELU)
    relu, gelu = report["arms"]
    assert (gelu["verdict"], gelu["mean"], gelu["difference"]) == ("diverged", None, None)
    assert [curve["seed"] for curve in gelu["diverged"]] == [1]
    assert relu["mean"] == here["arms"][0]["mean"]
    assert report["notes"] == ["gelu diverged on seed 1; the remaining seeds alone give no verdict"]
    assert "diverged 1/3" in run("runs", *RELU, *GELU)
    unfinish("relu-0", 7)
    report = comparison(run, *RELU, *GELU, "--so-far")
    assert [curve["steps"] for curve in report["arms"][0]["curves"]] == [[0, 4]] * 3
    assert report["arms"][1]["verdict"] == "diverged"


def test_runs_without_a_common_step_are_refused(run: Callable[..., str], here: dict[str, Any]) -> None:
    del here
    unfinish("gelu-1", 0)
    assert "no step at which all runs" in run("runs", *RELU, *GELU, "--so-far", status=1, stderr=True)
    text = Path("relu-1", METRICS).read_text()
    Path("relu-1", METRICS).write_text("nonsense\n")
    assert "cannot read `relu-1/metrics.jsonl`" in run("runs", *RELU, status=1, stderr=True)
    Path("relu-1", METRICS).write_text(text.replace('"step"', '"stop"'))
    assert "has no `step`" in run("runs", *RELU, status=1, stderr=True)
    Path("relu-1", METRICS).unlink()
    assert any("seed 1, is omitted: it has no val.loss" in note for note in comparison(run, *RELU)["notes"])


def test_what_is_printed(run: Callable[..., str], golden: Callable[[str, str], None], here: dict[str, Any]) -> None:
    text = run("runs", *RELU, *GELU, "-o", "page.html")
    golden("runs/compared/printed", re.sub(r" *[-+]?\d[\d.,]*", " #", text))
    page = Path("page.html").read_text(encoding="utf-8")
    assert drawn(page) == (["differences", "curves", "differences over the steps"], 1)
    assert "baseline: relu" in page
    for form in ("--markdown", "--latex"):
        of_sweep = run("runs", *RELU, *GELU, form, stderr=True)
        assert of_sweep.splitlines() == here["notes"]
    assert main(["runs", *RELU, "-o", "nowhere/page.html", "--no-plugins"]) == 1


def test_runs_below_a_folder_are_listed(here: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    Path("runs/begun").mkdir(parents=True)
    shutil.copy("relu-0/run.yaml", "runs/begun/run.yaml")
    shutil.copytree("relu-0", "runs/relu-0")
    shutil.copytree("gelu-0", "part")
    unfinish("part", 7)
    lines_before = Path("part", METRICS).read_text().splitlines(keepends=True)
    lines_before[2] = lines_before[2].replace("}", ', "once": 1.0}')  # the last of the metrics, at an early step
    Path("part", METRICS).write_text("".join(lines_before))
    assert main(["runs", "runs", "gelu-1", "part", "--list", "--json"]) == 0
    begun, first, second, part = json.loads(capsys.readouterr().out)
    assert [begun["folder"], first["folder"], second["folder"]] == ["runs/begun", "runs/relu-0", "gelu-1"]
    assert (first["name"], first["step"], first["steps"], first["ended"]) == ("small", 8, 8, "finished")
    assert (begun["step"], begun["steps"], begun["ended"], begun["latest"]) == (None, None, None, {})
    lines = [json.loads(line) for line in Path("gelu-1", METRICS).read_text(encoding="utf-8").splitlines()]
    latest = {name: value for line in lines for name, value in line.items()}  # of several lines, the last one
    assert second["latest"] == {name: value for name, value in latest.items() if name != "step"}
    assert latest["loss"] != next(line["loss"] for line in lines if "loss" in line)
    last = json.loads(Path("part", METRICS).read_text(encoding="utf-8").splitlines()[-1])["step"]
    assert (part["step"], part["ended"]) == (last, None)
    assert last > 4  # the last evaluation
    assert main(["runs", "gelu-1", "part", "--list", "--on", "val.accuracy"]) == 0
    rows = [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["run", "name", "step", "ended", "loss", "val.accuracy"]
    assert [
        ["gelu-1", "small", "8 of 8", "finished", f"{latest['loss']:.4g}", f"{latest['val.accuracy']:.4g}"],
        ["part", "small", f"{last} of 8", "-", *(f"{part['latest'][name]:.4g}" for name in ("loss", "val.accuracy"))],
    ] == rows[2:4]
    for excluded in (["--so-far"], ["--margin", "0.1"]):
        assert main(["runs", "runs", "--list", *excluded]) == 2
    assert "--list cannot be combined with --margin" in " ".join(capsys.readouterr().err.split())
    Path("empty").mkdir()
    assert main(["runs", "empty", "--list"]) == 1
    assert "`empty` contains no run" in capsys.readouterr().err

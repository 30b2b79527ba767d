"""`solve --memory`: the largest sizes of a run's model, compared with all sizes and with the plan of the run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.run.training.runs import write_run
from tfkit.cli import main
from tfkit.tools.common.units import bytes_text
from tfkit.tools.solve.of_run import SizeSearch
from tfkit.tools.solve.search import KINDS, Grid, GridPoint
from tfkit.tools.train.per_process import PerProcess


@pytest.mark.parametrize("budget", [3e4, 2e6, 1e7])
def test_the_largest_sizes_of_a_grid(budget: float) -> None:
    """The peak is in the evaluation of deep models, and neither is proportional to the parameters."""
    grid = Grid(range(2, 400, 2), range(1, 300), None, 4.0, lambda depth, width: depth * width**2 + 100 * width)
    calls = []

    def plan(depth: int, width: int) -> PerProcess:
        calls.append((depth, width))
        value = grid.value(depth, width)
        step = {"weights": value, "gradients": value, "states": 2 * value, "activations": 90 * depth * width}
        rest = dict.fromkeys(("gathered", "casts", "sent", "copied", "flops"), 0)
        return PerProcess(1, 1, **step, **rest, logits=7000, evaluation=4 * value + 4 * depth**2 * width)

    def fits(point: GridPoint) -> bool:
        return plan(point.depth, point.width).peak <= budget

    points = SizeSearch(grid, budget, plan).points()
    assert len(calls) < 60
    expected = []
    for kind in range(-KINDS, KINDS + 1):
        middle = [width for width in grid.all_widths if fits(grid.of_shape(kind, width))]
        widths = range(max(middle, default=1), max(middle, default=0) + 2)
        sizes = [grid.point(depth, width) for width in widths for depth in grid.depths]
        sizes = [size for size in sizes if grid.kind_of(size) == kind and fits(size)]
        expected += [max(sizes, key=lambda size: size.value)] if sizes else []
    assert len(expected) > 2
    assert sorted(points, key=str) == sorted(expected, key=str)
    assert abs(grid.shape_of(points[0])) == min(abs(grid.shape_of(point)) for point in points)


def peak(words: list[str], capsys: pytest.CaptureFixture[str]) -> int:
    assert main([*words, "--json"]) == 0
    needs = json.loads(capsys.readouterr().out)
    return max(needs["total"], needs["evaluation"])


def test_a_size_fits_and_one_more_layer_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, sets = str(write_run(tmp_path)), ["machine.shard=2", "batch.sequences=8", "precision=bfloat16"]
    options = ["--processes", "4", "--no-plugins"]
    changes = [word for change in sets for word in ("--set", change)]
    assert main(["solve", run, "--memory", "400kB", *options, *changes, "--keep", "d_model", "--json"]) == 0
    (size,) = json.loads(capsys.readouterr().out)["sizes"]
    assert size["sets"][:3] == sets
    words = ["train", run, "--plan", *options, *(word for change in size["sets"] for word in ("--set", change))]
    assert peak(words, capsys) == size["value"] <= 400e3
    more = f"model.decoder.n_layers={size['n_layers']['decoder'] + 1}"
    assert peak([*words, "--set", more], capsys) > 400e3


def test_a_single_process_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    run, file = write_run(tmp_path).name, "solved.yaml"
    words = ["solve", run, "--no-plugins", "--set", "machine.recompute=full", "--set", "model.decoder.n_layers=3"]
    assert main([*words, "--memory", "0.5MB", "-o", file]) == 0
    title, _, header, _, row, _, *command = capsys.readouterr().out.splitlines()
    assert title == "small in 500.0 kB of a single process"
    assert header.split() == ["layers", "d_model", "heads", "d_ff", "parameters", "memory", "free"]
    assert row.split()[0] == "3"
    assert command[0].startswith(f"tfkit train {run} --plan --processes=1")
    assert command[-1] == f"wrote {file}: 3 x {row.split()[1]}"
    words = ["train", run, "--plan", "--processes", "1", "--no-plugins", "--set", f"model={file}"]
    expected = peak([*words, "--set", "machine.recompute=full"], capsys)
    assert bytes_text(expected).split()[0] in row.split()


@pytest.mark.slow
def test_parameters_of_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = str(write_run(tmp_path))
    assert main(["solve", run, "--no-plugins", "--params", "20k", "--set", "model.decoder.n_layers=3", "--json"]) == 0
    for size in json.loads(capsys.readouterr().out)["sizes"]:
        words = [word for change in size["sets"] for word in ("--set", change)]
        assert size["sets"][0] == "model.decoder.n_layers=3"
        assert main(["params", run, "--no-plugins", *words, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["total"] == size["parameters"]


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        ("small.yaml --memory 1GB --params 1M", 2, "exactly one budget must be set: --params, --active or --memory"),
        ("small.yaml --params 1M --processes 2", 2, "--processes needs --memory"),
        ("small.yaml --memory 80", 2, "`80` is not an amount above zero; write it like `80GB`"),
        ("gpt2 --memory 1GB", 1, "--memory needs a run, whose batch and precision decide how much a size needs"),
        ("gpt2 --memory 1GB", 1, "help: name a run, or write one for this model: `tfkit new run gpt2 -o run.yaml"),
        ("minigpt_rel --memory 1GB", 1, "there is no run `minigpt_rel`\n   = help: a run with a similar name exists"),
        ("small.yaml --memory 1GB --processes 4", 1, "a batch of 6 sequences cannot be divided among 4 processes"),
        (
            "small.yaml --memory 9kB",
            1,
            "no size of small fits 9.0 kB in a single process\n   = the smallest size needs",
        ),
        (
            "small.yaml --memory 125kB --set machine.recompute=2 --keep d_model",
            1,
            "= for the largest size that fits, with n_layers 1",
        ),
        ("small.yaml --memory 1GB --set model.d_model=17", 1, "(model.graph.decoder.attention.n_heads)"),
    ],
)
def test_budgets_that_cannot_be_met(
    words: str,
    status: int,
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path)
    assert main(["solve", *words.split(), "--no-plugins"]) == status
    assert text in capsys.readouterr().err

"""A single value that varies until the model has a number of parameters."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tfkit
from tests.run.training.runs import write_run
from tfkit.cli import main
from tfkit.tools.params.count import count_params
from tfkit.tools.solve.budget import Budget
from tfkit.tools.solve.vary import PRECISION, nearest_value


@pytest.mark.parametrize(
    ("path", "amount"),
    [("decoder.ffn.d_ff", 4_000_000), ("decoder.ffn.d_ff", 3_333_333), ("vocab_size", 6_000_000), ("max_len", 2**23)],
)
def test_only_the_value_changes(path: str, amount: int) -> None:
    sets = [
        "decoder.n_layers=2",
        "d_model=192",
        "decoder.attention.n_heads=6",
        "decoder.ffn.d_ff=700",
        "vocab_size=900",
    ]
    (size,) = tfkit.solve("gpt2", Budget("params", amount), vary=path, sets=sets).sizes
    *before, change = size.sets
    assert before == sets
    assert change.startswith(f"{path}=")
    model = tfkit.load("gpt2", sets=size.sets)
    assert count_params(model).total == size.parameters
    assert (size.d_model, size.n_layers, size.n_heads) == (192, {"decoder": 2}, 6)
    assert abs(size.difference) <= PRECISION * amount
    assert size.value - amount == size.difference


@pytest.mark.parametrize("start", [1, 7, 40, 100_000])
@pytest.mark.parametrize("power", [1, 2, 3])
def test_the_search_ends_at_the_nearest_value(start: int, power: int) -> None:
    calls: list[int] = []

    def count(number: int) -> int:
        calls.append(number)
        return 1_000 + 3 * number**power

    budget = Budget("params", 1_000 + 3 * 613**power + 1)
    actual = nearest_value(count, start, budget, "d_ff")
    exact = min(range(1, 2_000), key=lambda number: abs(count(number) - budget.amount))
    del calls[-1999:]
    assert abs(count(actual) - budget.amount) <= max(PRECISION * budget.amount, abs(count(exact) - budget.amount))
    assert len(set(calls)) < 80


def test_a_value_is_rounded_only_if_that_costs_little() -> None:
    assert nearest_value(lambda n: 100 * n, 3, Budget("params", 102_440), "d_ff") == 1_024
    assert nearest_value(lambda n: 100 * n, 3, Budget("params", 103_140), "d_ff") == 1_032
    assert nearest_value(lambda n: 100 * n, 3, Budget("params", 1_310), "d_ff") == 13
    assert nearest_value(lambda n: 100 * n, 3, Budget("params", 1_390), "d_ff") == 14


def test_a_value_of_a_run_and_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    options = ["small.yaml", "--params", "12.5K", "--vary", "model.decoder.ffn.d_ff", "--set", "model.d_model=20"]
    assert main(["solve", *options, "--json", "-o", "new.yaml"]) == 0
    (size,) = json.loads(capsys.readouterr().out)["sizes"]
    assert size["sets"][0] == "model.d_model=20"
    assert size["sets"][1].startswith("model.decoder.ffn.d_ff=")
    assert size["d_ff"] not in (32, None)
    assert count_params(tfkit.load("new.yaml")).total == size["parameters"]
    assert main(["params", "small.yaml", *(f"--set={change}" for change in size["sets"]), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)[0]["total"] == size["parameters"]


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("--vary decoder.ffn.dff", "error: `decoder.ffn.dff` must be the path of an integer of gpt2"),
        ("--vary decoder.ffn", "error: `decoder.ffn` must be the path of an integer of gpt2"),
        ("--vary decoder.attention.n_heads", "error: no value of `decoder.attention.n_heads` gives 130,000,000 param"),
        ("--vary decoder.ffn.d_ff --keep d_model", "error: --vary cannot be combined with --keep"),
        ("--keep d_model --keep n_layers", "error: `--keep` takes one value; got 2"),
        ("--vary d_model --vary max_len", "error: `--vary` takes one value; got 2"),
    ],
)
def test_errors(words: str, error: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "gpt2", "--params", "130M", *words.split()]) != 0
    assert capsys.readouterr().err.startswith(error)


def test_a_run_takes_its_own_paths_and_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["solve", "small.yaml", "--memory", "1GB", "--vary", "model.decoder.ffn.d_ff"]) == 2
    assert capsys.readouterr().err.startswith("error: --vary cannot be combined with --memory")
    with pytest.raises(ValueError, match="`vary` cannot be combined with `keep`"):
        tfkit.solve("gpt2", Budget("params", 10**8), vary="d_model", keep="n_layers")

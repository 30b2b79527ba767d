"""The command `solve`."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import tfkit
from tfkit.cli import main
from tfkit.console.output import TABLE_WIDTH
from tfkit.tools.params.count import count_params
from tfkit.tools.solve.command import _command_lines
from tfkit.tools.solve.solve import extending_spec

from ...sampling import some


def test_table_and_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "gpt2", "--params", "124.4M"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "gpt2 near 124,400,000 parameters"
    assert lines[4].split() == ["12", "768", "12", "3,072", "124,439,808", "+0.03%"]
    assert "tfkit params gpt2" in lines
    assert "tfkit params gpt2 --set decoder.n_layers=10 --set d_model=832 \\" in lines
    assert max(map(len, lines)) <= 80


def test_a_command_counts_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "t5_small", "--params", "100M", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    for size in report["sizes"]:
        sets = [word for change in size["sets"] for word in ("--set", change)]
        assert main(["params", "t5_small", *sets, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["total"] == size["parameters"]


@pytest.mark.parametrize(
    "changes",
    some(
        [
            [],
            ["--set", "vocab_size=1000"],
            ["--set", "decoder.ffn={kind: swiglu, d_ff: 2 * d_model}"],
            ["--set", "decoder.attention.kind=mqa", "--set", "vocab_size=53600", "--keep", "d_model"],
            ["--set", "decoder.norm={kind: rmsnorm}"],
        ],
        2,
    ),
)
def test_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: list[str]) -> None:
    file = tmp_path / "mine_10m.yaml"
    assert main(["solve", "gpt2", "--params", "60M", *changes, "-o", str(file), "--json"]) == 0
    size = json.loads(capsys.readouterr().out)["sizes"][0]
    assert main(["validate", str(file)]) == 0
    graph = tfkit.load(file)
    assert (graph.name, graph.spec.model.parameters) == ("mine_10m", size["parameters"])
    assert count_params(graph).total == size["parameters"]
    assert str(graph.nodes[1].config) == str(tfkit.load("gpt2", sets=size["sets"]).nodes[1].config)


def test_a_size_far_from_the_budget_is_not_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.yaml"
    words = ["solve", "gpt2", "--keep", "d_model", "--set", "vocab_size=20000", "-o", str(file)]
    assert main([*words, "--params", "63M"]) == 1
    error = capsys.readouterr().err
    assert "no size of gpt2 is within 2% of 63,000,000 parameters" in error
    assert "the nearest size has 65,763,072 parameters (+4.39%)" in error
    assert not file.exists()
    option, value = error.split("`")[-2].split()
    assert main([*words, option, value]) == 0
    assert count_params(tfkit.load(file)).total == int(value)


def test_a_file_beside_the_spec_that_it_extends(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    base, file = tmp_path / "base.yaml", tmp_path / "own" / "larger.yaml"
    base.write_text("tfkit: 1\nextends: gpt2\nname: base\nvocab_size: 100\n", encoding="utf-8")
    assert main(["solve", str(base), "--params", "200M", "-o", str(file)]) == 0
    assert "extends: ../base.yaml" in file.read_text(encoding="utf-8")
    assert tfkit.load(file).nodes[0].config.vocab_size == 100  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "exactly one budget must be set: --params, --active or --memory"),
        (["--params", "1M", "--active", "1M"], "exactly one budget"),
        (["--params", "124Q"], "`124Q` is not an amount above zero; write it like `124M`"),
        (["--params", "0"], "`0` is not an amount above zero"),
        (["--params", "-3M"], "`-3M` is not an amount above zero"),
        (["--params", "1e400"], "is not an amount above zero"),
        (["--params", "1M", "--keep", "vocab"], "--keep"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], text: str) -> None:
    assert main(["solve", "gpt2", *arguments]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "amount"),
    [("124M", 124e6), ("1.5B", 1.5e9), ("7e9", 7e9), ("124,439,808", 124439808), ("1.5 b", 1.5e9), (".5k", 500)],
)
def test_amounts(text: str, amount: float) -> None:
    from tfkit.tools.solve.command import Amount

    assert Amount().convert(text, None, None) == amount


def test_a_wrong_spec(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "gpt", "--params", "1M"]) == 1
    assert "there is no spec named `gpt`" in capsys.readouterr().err
    assert main(["solve", "gpt2", "--params", "1M", "--json"]) == 1
    assert "as small as" in json.loads(capsys.readouterr().out)["errors"][0]["message"]


def test_what_set_took_away_is_away_in_the_spec_that_is_written(tmp_path: Path) -> None:
    plugins, path = tfkit.load_plugins(entry_points=False), tmp_path / "small.yaml"
    path.write_text(extending_spec("llama_7b", ["bias=null", "checkpoint=null"], path, plugins))
    assert "\nbias: null\n" in path.read_text()
    written, expected = (tfkit.load(spec, sets=sets, plugins=plugins).spec.model for spec, sets in (
        (path, ()), ("llama_7b", ["bias=null", "checkpoint=null", "name=small"])
    ))  # fmt: skip
    assert written.model_copy(update={"parameters": None}) == expected


@pytest.mark.parametrize("length", range(1, 40))
def test_a_command_fills_its_lines(length: int) -> None:
    size: Any = SimpleNamespace(sets=("a=1", "b=" + "9" * length, "d_model=64", "c=" + "7" * (length + 20), "n=2"))
    lines = list(_command_lines("tfkit params small.yaml", size))
    assert max(map(len, lines)) <= TABLE_WIDTH
    joined = " ".join(line.removesuffix(" \\").strip() for line in lines)
    assert joined == " ".join(["tfkit params small.yaml", *(f"--set {change}" for change in size.sets)])
    for line, following in pairwise(lines):
        word = " ".join(following.split()[:2])
        assert len(line.removesuffix(" \\")) + len(f" {word} \\") > TABLE_WIDTH


def test_a_node_with_the_name_of_a_field_of_the_spec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decoder = "{block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 4}, ffn: {kind: gelu, d_ff: 256}}"
    graph = f"{{embedding: embedding, norm: {decoder}, logits: lm_head}}"
    (tmp_path / "odd.yaml").write_text(f"tfkit: 1\nname: odd\nvocab_size: 100\nd_model: 64\ngraph: {graph}\n")
    assert main(["solve", str(tmp_path / "odd.yaml"), "--params", "1M", "--json"]) == 0
    sizes = json.loads(capsys.readouterr().out)["sizes"]
    for size in sizes:
        assert count_params(tfkit.load(tmp_path / "odd.yaml", sets=size["sets"])).total == size["parameters"]
    assert any(change.startswith("graph.norm.n_layers=") for size in sizes for change in size["sets"])

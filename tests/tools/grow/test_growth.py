"""Grown models compute the function of their source: by the logits of both, and by transformers' models of both."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from transformers import AutoModelForCausalLM

import tfkit
from tfkit.checkpoint.weight_map import tensor_locations_of
from tfkit.cli import main
from tfkit.graph.expand import load
from tfkit.tools.check.reduced import reduced_model
from tfkit.tools.grow.changes import larger_spec
from tfkit.tools.grow.growth import GrownStart, grow

from ...docs.page import ROOT

SMALL_SIZES = ["d_model=16", "vocab_size=23", "decoder.n_layers=2", "decoder.ffn.d_ff=20"]
GROUPS = "decoder.attention={kind: gqa, n_heads: 4, n_kv_heads: 2, position: rope}"
TOKENS = torch.arange(22).view(2, 11)


def small_model(*sets: str, spec: str = "char_swiglu") -> fx.GraphModule:
    """Build a small model in which no weight is 0 or 1."""
    model = tfkit.build(spec, sets=[*SMALL_SIZES, GROUPS, *sets], dtype="float64", seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model.eval()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("grow") / "small"
    tfkit.save(small_model(), path)
    return path


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def logits_of(folder: Path) -> Tensor:
    with torch.no_grad():
        return tfkit.build(folder).eval()(TOKENS)


def weights_of(folder: Path | str) -> dict[str, Tensor]:
    """Return the weights of a model by name, with the parts of fused weights."""
    model = tfkit.build(folder)
    return {name: location.view(model.state_dict()) for name, location in tensor_locations_of(model).items()}


Run = Callable[..., str]


def test_a_grown_folder_has_the_logits_of_its_source(folder: Path, run: Run) -> None:
    changes = ["d_model=32", "n_heads=8", "n_kv_heads=4", "d_ff=27", "n_layers=5", "vocab_size=29"]
    text = run("grow", str(folder), *changes, "-o", "large")
    expected = logits_of(folder)
    actual = logits_of(Path("large"))
    assert actual.shape[-1] == 29
    torch.testing.assert_close(actual[..., :23], expected, rtol=1e-12, atol=1e-12)
    assert expected.std() > 0.1
    assert "logits are divided" not in text  # the norm before the tied head is divided instead
    assert re.search(r"^all changes +\d\.\de-1\d +yes$", text, re.MULTILINE)


def test_fewer_key_value_heads_are_measured(folder: Path, run: Run) -> None:
    """The heads are means, and the difference is the difference of the logits."""
    printed = json.loads(run("grow", str(folder), "n_kv_heads=1", "--json", "-o", "large"))
    name = "decoder.layers.1.attention.project.k.weight"
    heads, mean = weights_of(folder)[name], weights_of("large")[name]
    torch.testing.assert_close(mean, (heads[:4] + heads[4:]) / 2)
    assert printed["exact"] is False
    assert printed["steps"][0]["rule"] == "the mean of adjacent units"
    assert 1e-3 < printed["difference"] < 2


def test_new_units_are_random_and_read_as_zeros(folder: Path, run: Run) -> None:
    run("grow", str(folder), "d_ff=27", "-o", "large")
    weights = weights_of("large")
    assert weights["decoder.layers.1.ffn.gate.weight"][20:].std() > 0.005
    assert not weights["decoder.layers.1.ffn.down.weight"][:, 20:].any()
    assert weights["decoder.layers.1.ffn.down.weight"][:, :20].std() > 0.05


def test_layers_alone_are_a_short_map(folder: Path, run: Run) -> None:
    """Each layer is followed by its copy, whose last linear layers are zero."""
    printed = json.loads(run("grow", str(folder), "n_layers=4", "--json"))
    zeros = [f"decoder.layers.[1 3].{name}.weight" for name in ("attention.output", "ffn.down")]
    assert printed["weights"]["map"] == {"decoder.layers.{i}": "decoder.layers.{i // 2}", **dict.fromkeys(zeros, 0)}
    assert printed["difference"] == 0


@pytest.mark.slow
def test_noise_distinguishes_copies(folder: Path, run: Run) -> None:
    """Repeated channels are equal without noise; with noise, the deviation of their difference is known."""
    for noise in ("0", "0.1"):
        run("grow", str(folder), "d_model=32", "--noise", noise, "-o", noise)
    tables = [weights_of(noise)["embedding.tokens.weight"] for noise in ("0", "0.1")]
    assert torch.equal(tables[0][:, ::2], tables[0][:, 1::2])
    difference = tables[1][:, ::2] - tables[1][:, 1::2]
    assert float(difference.std() / tables[0].std()) == pytest.approx(0.1 * 2**0.5, rel=0.2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("n_hads=8", "has no value `n_hads`"),
        ("n_heads=2", "no rule gives the weights for `decoder.attention.n_heads 4 -> 2`"),
        ("vocab_size=11", "no rule gives the weights for `vocab_size 23 -> 11`"),
        ("d_model=24", "no rule gives the weights for `d_model 16 -> 24`"),
        ("n_heads=4", "the larger model must differ"),
        ("d_model=many", "--> change:1:9\n"),
        ("d_model", "for instance `decoder.n_layers=2`"),
        ("decoder.ffn={kind: swigly}", "--> change:1:20\n"),
    ],
)
def test_errors(folder: Path, change: str, message: str, run: Run) -> None:
    text = run("grow", str(folder), change, status=1, stderr=True)
    assert message in text
    assert "--set" not in text
    assert text.count("error: ") == 1


@pytest.mark.parametrize(("change", "sizes"), [("d_ff=27", (27, 40)), ("decoder.d_ff=27", (20, 27))])
def test_a_change_applies_to_each_value_that_equals_the_first(change: str, sizes: tuple[int, int]) -> None:
    layer = "n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: %d}"
    graph = tfkit.loads(f"""
    {{tfkit: 1, name: pair, d_model: 16, vocab_size: 23, inputs: [source, target], graph: {{
      embedding: {{block: embedding, input: source}}, encoder: {{block: encoder, {layer % 20}}},
      prefix: {{block: embedding, input: target}},
      decoder: {{block: decoder, memory: encoder, cross_attention: {{kind: mha, n_heads: 2}}, {layer % 40}}},
      head: lm_head}}}}""")
    larger: Any = larger_spec(graph, [change], tfkit.load_plugins(entry_points=False)).model.graph
    assert (larger["encoder"].ffn.d_ff, larger["decoder"].ffn.d_ff) == sizes


def test_an_unknown_value_is_marked_in_its_path(folder: Path, run: Run) -> None:
    change = "decoder.attention.n_hads=8"
    line, marks = run("grow", str(folder), change, status=1, stderr=True).split("\n")[3:5]
    start = line.index(change) + change.index("n_hads")
    assert (marks.index("^"), marks.count("^")) == (start, len("n_hads"))


def test_a_run_file_needs_a_run(folder: Path, run: Run) -> None:
    text = run("grow", str(folder), "d_ff=27", "-o", "large.yaml", status=1, stderr=True)
    assert "a run must start from the folder of a run" in text
    assert not Path("large.yaml").exists()


# ---- specs of all kinds ----


def growth_of(spec: str, *changes: str) -> GrownStart:
    """Grow a reduced model of a spec with random weights."""
    plugins = tfkit.load_plugins()
    return grow(reduced_model(load(spec, plugins=plugins), plugins).graph, changes, plugins)


def rows() -> list[tuple[str, list[str], bool]]:
    """Return the rows of the table of what is exact."""
    page = (ROOT / "docs" / "growing.md").read_text(encoding="utf-8")
    matches = re.findall(r"^\| (\w+) \| `(.+)` \| (yes|no) \|$", page, re.MULTILINE)
    return [(spec, re.split(r" (?=\w+=)", changes), exact == "yes") for spec, changes, exact in matches]


QUICK_ROWS = (1, 9)
"""A tied head with positions that are learned, and norms of queries and keys."""


@pytest.mark.parametrize(
    ("spec", "changes", "exact"),
    [pytest.param(*row, marks=[pytest.mark.slow] * (n not in QUICK_ROWS)) for n, row in enumerate(rows())],
)
def test_the_table_of_what_is_exact(spec: str, changes: list[str], exact: bool) -> None:
    growth = growth_of(spec, *changes)
    assert growth.exact is exact
    assert growth.difference < 1e-12 or not exact
    assert all(step.exact for step in growth.steps) or not exact


def test_the_table_has_rows() -> None:
    assert len(rows()) >= 19


# ---- runs ----

RUN = {
    "tfkit": 1,
    "name": "small",
    "model": {"extends": "char_swiglu", "vocab_size": "data.vocab_size"},
    "data": {"kind": "text", "files": "tinyshakespeare"},
    "batch": {"sequences": 4, "length": 16},
    "steps": 2,
    "optimizer": {"kind": "adamw", "lr": 1e-2},
    "eval": {"every": 2, "splits": {"val": {"batches": 4}}},
}


@pytest.mark.slow
def test_a_grown_run_begins_at_the_loss_of_its_source(run: Run) -> None:
    """It then trains: its last loss is lower, and what was zero is not."""
    small = [change for change in (*SMALL_SIZES, GROUPS) if "vocab_size" not in change]
    sets = [f"--set=model.{change}" for change in small]
    Path("small.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    run("train", "small.yaml", "-o", "small", *sets, stderr=True)
    run("grow", "small", "d_model=32", "n_heads=8", "d_ff=27", "n_layers=3", "-o", "large.yaml")
    run("train", "large.yaml", "-o", "large", "--set=steps=20", "--set=eval.every=20", stderr=True)
    last, first, trained = (losses(folder)[step] for folder, step in (("small", 2), ("large", 0), ("large", 20)))
    assert first == pytest.approx(last, rel=1e-6)
    assert trained < first - 0.1
    assert weights_of("large")["decoder.layers.1.ffn.down.weight"][:, 20:].all()


@pytest.mark.slow
def test_an_error_leaves_files_as_they_were(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("small.yaml").write_text(json.dumps(RUN), encoding="utf-8")
    run("train", "small.yaml", "-o", "small", "--stop-after", "1", stderr=True)
    record = Path("small/run.yaml").read_bytes()
    text = run("grow", "small", "d_ff=300", "-o", "small/run.yaml", status=1, stderr=True)
    assert "the run of the larger model cannot replace the run that it starts from" in text
    assert Path("small/run.yaml").read_bytes() == record

    def invalid(*_: object) -> None:
        raise tfkit.SpecError(tfkit.Diagnostic("an invalid run"))

    Path("large.yaml").write_text("# kept", encoding="utf-8")
    monkeypatch.setattr("tfkit.tools.grow.files.check_run", invalid)
    assert "an invalid run" in run("grow", "small", "d_ff=300", "-o", "large.yaml", status=1, stderr=True)
    assert Path("large.yaml").read_text(encoding="utf-8") == "# kept"


def losses(folder: str) -> dict[int, float]:
    lines = (json.loads(line) for line in Path(folder, "metrics.jsonl").read_text(encoding="utf-8").splitlines())
    return {line["step"]: line["val.loss"] for line in lines if "val.loss" in line}


# ---- transformers ----


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spec", "sets", "changes"),
    [
        ("gpt2", ["max_len=16"], ["d_model=32", "n_heads=8", "d_ff=300", "n_layers=4"]),
        ("llama3_8b", ["decoder.attention.n_kv_heads=2"], ["d_model=32", "n_heads=8", "n_kv_heads=4", "n_layers=4"]),
        ("llama3_8b", ["decoder.attention.n_kv_heads=2"], ["d_ff=300", "vocab_size=29"]),
        ("mixtral_8x7b", ["decoder.attention.n_kv_heads=2"], ["d_model=32", "n_heads=8", "n_layers=4"]),
        ("gemma2_2b", ["decoder.attention.n_kv_heads=2"], ["n_heads=8", "d_ff=300", "n_layers=4"]),
    ],
)
def test_transformers_computes_the_logits_of_both(spec: str, sets: list[str], changes: list[str], run: Run) -> None:
    heads = ["decoder.attention.n_heads=4", "decoder.attention.d_head=4"]
    heads = heads[:1] if spec == "gpt2" else heads
    model = tfkit.build(spec, sets=[*SMALL_SIZES, *heads, *sets], seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    tfkit.save(model, "small")
    assert main(["grow", "small", *changes, "-o", "large"]) == 0
    logits = []
    for name in ("small", "large"):
        tfkit.save(tfkit.build(name), f"published/{name}", layout="huggingface")
        published = AutoModelForCausalLM.from_pretrained(f"published/{name}").eval()
        published = published if spec == "mixtral_8x7b" else published.double()  # its experts cannot be in float64
        with torch.no_grad():
            logits.append(published(TOKENS % 23).logits)
    torch.testing.assert_close(logits[1][..., :23], logits[0], rtol=1e-5, atol=2e-6)
    assert logits[0].std() > 0.05

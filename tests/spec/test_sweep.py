"""The file of a sweep: what it may say, the runs of its variants, and the errors of what it may not."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.runs import PLUGINS, RUN, write_run
from tfkit.errors import SpecError
from tfkit.graph.run import load_run
from tfkit.spec.read_sweep import read_sweep, shipped_sweeps
from tfkit.tools.sweep.arms import Arms
from tfkit.tools.sweep.equal import check_equal, sizes

EVALUATED = RUN + "eval: {every: 4, splits: {val: {batches: 2}}, metrics: [loss, accuracy]}\n"
SWEEP = """\
tfkit: 1
base: small.yaml
variants:
  relu: {}
  swiglu: {model.decoder.ffn: {kind: swiglu, d_ff: 21}}
  deeper: {model: {graph: {decoder: {n_layers: 3}}}}
seeds: [0, 1]
compare: {to: relu, on: val.loss}
"""
TUNE = "tune: {over: {optimizer.lr: [1e-3, 1e-2]}, seeds: [9], steps: 4}\n"
WRONG = {
    "no_variants": re.sub(r"variants:\n(  .*\n)+", "", SWEEP),
    "variants_of_a_word": re.sub(r"variants:\n(  .*\n)+", "variants: relu\n", SWEEP),
    "variant_of_a_word": SWEEP.replace("relu: {}", "relu: plain"),
    "misspelt_key": SWEEP.replace("seeds:", "seed:"),
    "misspelt_variant": SWEEP.replace("to: relu", "to: rela"),
    "misspelt_base": SWEEP.replace("small.yaml", "smal.yaml"),
    "misspelt_path": SWEEP.replace("decoder.ffn", "decodr.ffn"),
    "misspelt_kind": SWEEP.replace("kind: swiglu", "kind: swigl"),
    "misspelt_number": SWEEP.replace("val.loss", "test.loss"),
    "unknown_direction": SWEEP.replace("val.loss", "val.accuracy"),
    "path_with_a_hole": SWEEP.replace("model.decoder.ffn:", "model..ffn:"),
    "seed_of_a_variant": SWEEP.replace("relu: {}", "relu: {seed: 3}"),
    "seed_twice": SWEEP.replace("[0, 1]", "[0, 1, 0]"),
    "no_seed": SWEEP.replace("[0, 1]", "[]"),
    "seeds_of_tuning": SWEEP + TUNE.replace("[9]", "[1]"),
    "nothing_to_tune": SWEEP + TUNE.replace("{optimizer.lr: [1e-3, 1e-2]}", "{}"),
    "no_values_to_tune": SWEEP + TUNE.replace("[1e-3, 1e-2]", "[]"),
    "tuned_and_in_the_grid": SWEEP + TUNE + "grid: {optimizer.lr: [1, 2]}\n",
    "wrong_value_to_tune": SWEEP + TUNE.replace("1e-2", "-1"),
    "wrong_value_of_the_grid": SWEEP + "grid: {batch.sequences: [4, many]}\n",
    "equal_of_nothing": SWEEP + "equal: {}\n",
    "equal_to_a_number": SWEEP + "equal: {params: half}\n",
    "not_equal": SWEEP + "equal: {params: 5%}\n",
    "not_equal_flops": SWEEP + "equal: {flops: 5%}\n",
    "not_equal_tokens": SWEEP.replace("relu: {}", "relu: {}\n  longer: {steps: 12}") + "equal: {tokens: 0%}\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, EVALUATED)
    monkeypatch.chdir(tmp_path)


def arms_of(text: str) -> Arms:
    """The arms of a sweep's text, their sizes checked."""
    Path("sweep.yaml").write_text(text, encoding="utf-8")
    arms = Arms(read_sweep("sweep.yaml", PLUGINS), PLUGINS, Path("out"))
    if arms.config.equal is not None:
        check_equal(arms, sizes(arms, {}), Path("out"))
    return arms


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, golden: Callable[..., None]) -> None:
    with pytest.raises(SpecError) as wrong:
        arms_of(WRONG[name])
    golden(f"sweeps/errors/{name}", str(wrong.value))


def test_a_run_without_evaluations_has_nothing_to_compare() -> None:
    write_run(Path(), RUN)
    with pytest.raises(SpecError, match="the run has no `eval`"):
        arms_of(SWEEP)


def test_variants_are_the_runs_that_set_and_extends_make() -> None:
    """A path is assigned as by `--set`; a mapping merges as in a run that extends another."""
    arms = arms_of(SWEEP)
    cells = {arm.name: arms.cells(arm) for arm in arms.arms}
    assert [cell.seed for cell in cells["relu"]] == [0, 1]
    sets = {
        "relu": [],
        "swiglu": ["model.decoder.ffn={kind: swiglu, d_ff: 21}"],
        "deeper": ["model.decoder.n_layers=3"],
    }
    for name, changes in sets.items():
        for cell in cells[name]:
            assert cell.run.digest == load_run("small.yaml", PLUGINS, sets=[*changes, f"seed={cell.seed}"]).digest
            assert cell.folder.name == cell.run.digest[:16]


def test_another_kind_starts_anew_in_a_mapping_and_keeps_its_fields_in_a_path() -> None:
    arms = arms_of(SWEEP.replace("relu: {}", "relu: {}\n  gelu: {model.decoder.ffn.kind: gelu}"))
    gelu = arms.cells(arms.arm("gelu"))[0].run
    assert gelu.meaning["model.graph.decoder.ffn.d_ff"] == 32
    with pytest.raises(SpecError, match="d_ff"):
        arms_of(SWEEP.replace("relu: {}", "relu: {}\n  gelu: {model: {graph: {decoder: {ffn: {kind: swiglu}}}}}")
                .replace("ffn: {kind: swiglu}", "ffn: {kind: gelu, d_fff: 2}"))  # fmt: skip


def test_the_grid_crosses_all_variants() -> None:
    arms = arms_of(SWEEP + "grid: {optimizer.lr: [1e-3, 1e-2], batch.sequences: [4]}\n")
    assert len(arms.arms) == 6
    one = arms.arm("deeper, lr 0.01, sequences 4")
    assert one.base == "relu, lr 0.01, sequences 4"
    run = arms.cells(one)[0].run
    assert (run.config.optimizer.lr, run.config.batch.sequences) == (0.01, 4)


def test_trials_have_their_own_seeds_and_length() -> None:
    write_run(Path(), EVALUATED.replace("steps: 8", "passes: 1"))
    arms = arms_of(SWEEP + TUNE)
    (low,), (high,) = arms.trials["relu"]
    assert (low.run.steps, low.seed, low.run.config.optimizer.lr) == (4, 9, 1e-3)
    assert high.run.config.optimizer.lr == 1e-2
    assert arms.cells(arms.arm("relu"), 1)[0].run.config.optimizer.lr == 1e-2


SIZES = {"calculator": {905_109, 892_821}, "minigpt": {913_601}, "swiglu": {913_601}}


@pytest.mark.parametrize("name", shipped_sweeps())
def test_sweeps_that_come_with_tfkit(name: str) -> None:
    arms = Arms(read_sweep(name, PLUGINS), PLUGINS, Path("out"))
    found = sizes(arms, {})
    check_equal(arms, found, Path("out"))
    assert {one.parameters for one in found.values()} == SIZES[name]


# ---- mutations ----

WORDS = ["null", "-1", "[]", "{}", "true", "1e300", "x", "0.5", "[[1]]", "{a: 1}", "&a", "*a", "!t", "''", "007", "a.b"]


def mutant(number: int) -> str:
    """A sweep with one or two mistakes; some are none."""
    draw = random.Random(number)
    text = SWEEP + TUNE + "grid: {batch.sequences: [4, 5]}\nequal: {params: 90%}\n"
    for _ in range(draw.randint(1, 2)):
        change = draw.randrange(4)
        tokens = list(re.finditer(r"[\w.%-]+", text))
        token = draw.choice(tokens)
        if change == 0:
            text = text[: token.start()] + draw.choice(WORDS) + text[token.end() :]
        elif change == 1:
            text = text[: token.start()] + draw.choice(tokens)[0] + text[token.end() :]
        elif change == 2:
            at = draw.randrange(len(text))
            text = text[:at] + draw.choice("{}[]:,- \n'x") + text[at + draw.randint(0, 1) :]
        else:
            lines = text.splitlines(keepends=True)
            del lines[draw.randrange(len(lines))]
            text = "".join(lines)
    return text


def check_mutants(numbers: range) -> None:
    """Each is refused with a place, or has runs on all its seeds."""
    refused = 0
    for number in numbers:
        try:
            arms = arms_of(mutant(number))
        except SpecError as wrong:
            refused += 1
            for one in wrong.diagnostics:
                assert one.span is not None, f"{number}: {one.message}"
            continue
        for arm in arms.arms:
            assert [cell.seed for cell in arms.cells(arm)] == list(arms.config.seeds), number
    assert refused > len(numbers) / 3


def test_mistakes_put_in_at_random() -> None:
    check_mutants(range(50))


@pytest.mark.slow
def test_many_mistakes_put_in_at_random() -> None:
    check_mutants(range(50, 1050))

"""The file of a sweep: valid settings, the runs of its variants, and the errors of invalid settings."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.run.training.runs import PLUGINS, RUN, WITH_PLUGINS, write_run
from tfkit.errors import SpecError
from tfkit.run.checked_run import load_run
from tfkit.tools.params.count import count_params
from tfkit.tools.sweep.arms import Arms, all_choices
from tfkit.tools.sweep.comparison import _not_tuned, _transfer_remarks
from tfkit.tools.sweep.result import TrialResult, Tuned
from tfkit.tools.sweep.sweep import Sweep
from tfkit.tools.sweep.tuning import Tuning

from ..known import SWEEPS
from ..sampling import chosen, some

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
SEARCH = "tune: {over: {optimizer.lr: {log: [1e-3, 1e-1]}}, search: {trials: 4}, seeds: [9], steps: 2}\n"
WRONG: dict[str, Any] = {
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
    "previous_of_that_name": SWEEP.replace("to: relu", "to: previous").replace("deeper:", "previous:"),
    "margin_of_nothing": SWEEP.replace("val.loss}", "val.loss, margin: 0}"),
    "margin_of_one_variant": "tfkit: 1\nbase: small.yaml\nseeds: [0]\ncompare: {on: val.loss, margin: 0.1}\n",
    "two_mistakes": SWEEP.replace("[0, 1]", "[0, 1.5]").replace("val.loss}", "val.loss, margin: a}"),
    "no_seed": SWEEP.replace("[0, 1]", "[]"),
    "seeds_of_tuning": SWEEP + TUNE.replace("[9]", "[1]"),
    "nothing_to_tune": SWEEP + TUNE.replace("{optimizer.lr: [1e-3, 1e-2]}", "{}"),
    "no_values_to_tune": SWEEP + TUNE.replace("[1e-3, 1e-2]", "[]"),
    "tuned_and_in_the_grid": SWEEP + TUNE + "grid: {optimizer.lr: [1, 2]}\n",
    "wrong_value_to_tune": SWEEP + TUNE.replace("1e-2", "-1"),
    "wrong_value_of_the_grid": SWEEP + "grid: {batch.sequences: [4, many]}\n",
    "equal_of_nothing": SWEEP + "equal: {}\n",
    "equal_without_percent": [SWEEP + "equal: {params: half}\n", SWEEP + "equal: {params: 5}\n"],
    "not_equal": SWEEP + "equal: {params: 5%}\n",
    "not_equal_flops": SWEEP + "equal: {flops: 5%}\n",
    "not_equal_time": SWEEP + "equal: {time: 5%, device: a100}\n",
    "time_of_no_device": SWEEP + "equal: {time: 5%}\n",
    "time_of_a_misspelt_device": SWEEP + "equal: {time: 5%, device: a10}\n",
    "equal_by_nothing": SWEEP + "equal: {flops: 5%, by: decoder.ffn.d_ff}\n",
    "equal_by_a_misspelt_number": SWEEP + "equal: {params: 1%, by: decoder.ffn.dff}\n",
    "device_without_time": SWEEP + "equal: {params: 5%, device: a100}\n",
    "misspelt_name_of_a_size": SWEEP + "tokens: 20 * prams\n",
    "tokens_of_nothing": SWEEP + "tokens: params - params\n",
    "tokens_of_a_list": SWEEP + "tokens: [1, 2]\n",
    "tokens_twice": SWEEP.replace("relu: {}", "relu: {steps: 12}") + "tokens: 20 * params\n",
    "no_sizes": SWEEP + "sizes: {params: []}\n",
    "size_of_a_word": SWEEP + "sizes: {params: [4k, large]}\n",
    "size_too_small": SWEEP + "sizes: {params: [100]}\n",
    "sizes_of_two_lengths": SWEEP + "sizes: {model.d_model: [16, 32], model.decoder.ffn.d_ff: [32]}\n",
    "sizes_of_params_and_a_path": SWEEP + "sizes: {params: [4k], model.d_model: [16]}\n",
    "size_of_a_variant": SWEEP.replace("relu: {}", "relu: {model.d_model: 8}") + "sizes: {model.d_model: [16, 32]}\n",
    "misspelt_path_of_a_size": SWEEP + "sizes: {model.d_modl: [16]}\n",
    "largest_size_first": SWEEP + TUNE.replace("seeds", "at: smallest, seeds") + "sizes: {model.d_model: [32, 16]}\n",
    "tuned_at_no_size": SWEEP + TUNE.replace("seeds", "at: smallest, seeds"),
    "law_to_a_word": SWEEP + "fit: {on: params, to: large}\n",
    "arms_of_one_name": SWEEP + "grid: {optimizer.lr: [1e-3, 0.0010000001]}\n",
    "range_without_a_search": SWEEP + TUNE.replace("[1e-3, 1e-2]", "{log: [1e-3, 1e-2]}"),
    "range_without_two_ends": [
        SWEEP + SEARCH.replace("{log: [1e-3, 1e-1]}", "{log: [1e-3]}"),
        SWEEP + SEARCH.replace("log:", "lag:"),
    ],
    "range_from_zero": SWEEP + SEARCH.replace("[1e-3, 1e-1]", "[0, 1e-1]"),
    "fractions_of_whole_numbers": SWEEP + SEARCH.replace("log:", "whole:"),
    "a_law_of_no_loss": SWEEP.replace("val.loss}", "val.accuracy, better: higher}") + "fit: {on: params}\n",
    "a_law_of_a_misspelt_loss": SWEEP + "fit: {loss: vall.loss, on: params}\n",
    "not_equal_tokens": SWEEP.replace("relu: {}", "relu: {}\n  longer: {steps: 12}") + "equal: {tokens: 0%}\n",
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path, EVALUATED)
    monkeypatch.chdir(tmp_path)


def arms_of(text: str) -> Arms:
    """The arms of a sweep's text, their sizes checked."""
    Path("sweep.yaml").write_text(text, encoding="utf-8")
    return Sweep("sweep.yaml", PLUGINS, Path("out")).arms


@pytest.mark.parametrize("name", some(WRONG, 24))
def test_errors(name: str, golden: Callable[..., None]) -> None:
    texts = []
    for text in WRONG[name] if isinstance(WRONG[name], list) else [WRONG[name]]:
        with pytest.raises(SpecError) as error:
            arms_of(text)
        texts.append(str(error.value))
    golden(f"sweeps/errors/{name}", "\n".join(texts))


def test_a_run_without_evaluations_has_nothing_to_compare() -> None:
    write_run(Path(), RUN)
    with pytest.raises(SpecError, match="the run has no `eval`"):
        arms_of(SWEEP)


def test_variants_are_the_runs_that_set_and_extends_make() -> None:
    """A path is assigned as by `--set`; a mapping merges as in a run that extends another."""
    arms = arms_of(SWEEP)
    runs = {arm.name: arms.runs(arm) for arm in arms.arms}
    assert [cell.seed for cell in runs["relu"]] == [0, 1]
    sets = {
        "relu": [],
        "swiglu": ["model.decoder.ffn={kind: swiglu, d_ff: 21}"],
        "deeper": ["model.decoder.n_layers=3"],
    }
    for name, changes in sets.items():
        for cell in runs[name]:
            assert cell.run.digest == load_run("small.yaml", PLUGINS, sets=[*changes, f"seed={cell.seed}"]).digest
            assert cell.folder.name == cell.run.digest[:16]


def test_another_kind_starts_anew_in_a_mapping_and_keeps_its_fields_in_a_path() -> None:
    arms = arms_of(SWEEP.replace("relu: {}", "relu: {}\n  gelu: {model.decoder.ffn.kind: gelu}"))
    gelu = arms.runs(arms.arm("gelu"))[0].run
    assert gelu.semantics.values["model.graph.decoder.ffn.d_ff"] == 32
    with pytest.raises(SpecError, match="d_ff"):
        arms_of(SWEEP.replace("relu: {}", "relu: {}\n  gelu: {model: {graph: {decoder: {ffn: {kind: swiglu}}}}}")
                .replace("ffn: {kind: swiglu}", "ffn: {kind: gelu, d_fff: 2}"))  # fmt: skip


def test_the_grid_crosses_all_variants() -> None:
    arms = arms_of(SWEEP + "grid: {optimizer.lr: [1e-3, 1e-2], batch.sequences: [4]}\n")
    assert len(arms.arms) == 6
    arm = arms.arm("deeper, lr 0.01, sequences 4")
    assert arm.base == "relu, lr 0.01, sequences 4"
    run = arms.runs(arm)[0].run
    assert (run.config.optimizer.lr, run.config.batch.sequences) == (0.01, 4)


def test_each_variant_may_have_the_one_before_it_as_its_base() -> None:
    arms = arms_of(SWEEP.replace("to: relu", "to: previous") + "grid: {optimizer.lr: [1e-3, 1e-2]}\n")
    bases = {arm.name: arm.base for arm in arms.arms if arm.name.endswith("0.01")}
    names = ["relu, lr 0.01", "swiglu, lr 0.01", "deeper, lr 0.01"]
    assert bases == dict(zip(names, [names[0], *names], strict=False))
    named = arms_of(SWEEP.replace("deeper:", "previous:"))
    assert {arm.base for arm in named.arms} == {"relu"}


def test_trials_have_their_own_seeds_and_length() -> None:
    write_run(Path(), EVALUATED.replace("steps: 8", "epochs: 1"))
    arms = arms_of(SWEEP + TUNE)
    first, second = Tuning.of(arms, arms.arm("relu")).trials
    (low,), (high,) = first.runs, second.runs
    assert (low.run.steps, low.seed, low.run.config.optimizer.lr) == (4, 9, 1e-3)
    assert high.run.config.optimizer.lr == 1e-2
    assert arms.runs(arms.arm("relu"), second.choice)[0].run.config.optimizer.lr == 1e-2


SIZES = {
    "architecture": {913_601, 912_424},
    "calculator": {905_109, 892_821},
    "hybrid_recall": {114_096, 113_888, 113_940, 114_208},
    "hybrid_text": {114_144, 114_256, 114_228},
    "ladder": {16_129, 28_001, 59_633, 112_913},
    "minigpt": {913_601},
    "recipe": {913_601},
    "swiglu": {913_601},
}


def steps_of(arms: Arms) -> dict[str, int]:
    return {arm.name: arms.runs(arm)[0].run.steps for arm in arms.arms}


def parameters_of(arms: Arms) -> dict[str, int]:
    return {arm.name: count_params(arms.runs(arm)[0].run.graph).total for arm in arms.arms}


def test_a_length_from_the_size_of_each_run() -> None:
    arms = arms_of(SWEEP + "tokens: 3 * params / 2\n")
    step = 6 * 12
    assert steps_of(arms) == {name: -(-3 * count // (2 * step)) for name, count in parameters_of(arms).items()}
    small, large = (steps_of(arms_of(SWEEP + f"tokens: {compute} / flops\n"))["deeper"] for compute in ("1e8", "3e8"))
    assert large == pytest.approx(3 * small, abs=3)
    assert set(steps_of(arms_of(SWEEP + "tokens: 720\n")).values()) == {10}
    assert set(steps_of(arms_of(SWEEP + "tokens: 720 + 1 / 3\n")).values()) == {11}


@pytest.mark.parametrize("prefix", ["", "model."])
def test_equal_parameters_by_a_number_of_the_model(prefix: str) -> None:
    """A variant whose parameters are equal enough keeps its number."""
    text = SWEEP.replace("d_ff: 21}}", "d_ff: 21}}\n  nearly: {model.decoder.ffn.d_ff: 33}")
    before = parameters_of(arms_of(text))
    share = 100 * (before["nearly"] - before["relu"]) / before["relu"]
    arms = arms_of(text + f"equal: {{params: {share + 0.1:.2f}%, by: {prefix}decoder.ffn.d_ff}}\n")
    counts = parameters_of(arms)
    d_ffs = {arm.name: arms.runs(arm)[0].run.semantics.values["model.graph.decoder.ffn.d_ff"] for arm in arms.arms}
    assert (counts["relu"], d_ffs["relu"], d_ffs["nearly"]) == (before["relu"], 32, 33)
    assert d_ffs["deeper"] < 32
    assert all(abs(count - counts["relu"]) <= share / 100 * counts["relu"] + 1 for count in counts.values())
    assert [arm.base for arm in arms.arms] == ["relu"] * 4


def test_equal_parameters_of_the_variant_before() -> None:
    """Each variant equals the one before it, as that variant is after its own change."""
    text = SWEEP.replace("to: relu", "to: previous").replace("d_ff: 21", "d_ff: 48")
    text += "grid: {model.d_model: [16, 24]}\n"
    counts = parameters_of(arms_of(text + "equal: {params: 3%, by: decoder.ffn.d_ff}\n"))
    for width in (16, 24):
        relu, swiglu, deeper = (counts[f"{name}, d_model {width}"] for name in ("relu", "swiglu", "deeper"))
        assert abs(swiglu - relu) <= 0.03 * relu
        assert abs(deeper - swiglu) <= 0.03 * swiglu


def test_equal_flops_by_the_length() -> None:
    arms_of(SWEEP + "tokens: 1e9 / flops\nequal: {flops: 2%}\n")


def test_equal_time_on_a_device() -> None:
    """Predicted: a model with half more layers needs about half more time."""
    with pytest.raises(SpecError) as raised:
        arms_of(SWEEP + "equal: {time: 5%, device: a100}\n")
    assert re.findall(r"about (\d+) steps", str(raised.value))[-1] in ("5", "6")
    Path("mine.yaml").write_text("{flops: {float32: 1e12}, bandwidth: 1e11, memory: 1e9}", encoding="utf-8")
    arms_of(SWEEP + "equal: {time: 60%, device: mine.yaml}\n")


def test_variants_in_several_sizes() -> None:
    arms = arms_of(SWEEP + "sizes: {params: [6k, 20k]}\n")
    names = [f"{variant}, {size}" for variant in ("relu", "swiglu", "deeper") for size in ("6K", "20K")]
    assert [arm.name for arm in arms.arms] == names
    assert arms.arm("deeper, 20K").base == "relu, 20K"
    counts = parameters_of(arms)
    for name, count in counts.items():
        expected = int(name.split()[1][:-1]) * 1000
        assert abs(count - expected) < 0.1 * expected, name


SIZES_BY_PATH = "sizes: {model.d_model: [16, 32], model.decoder.ffn.d_ff: [40, 80]}\n"
ONE_VARIANT = (
    "tfkit: 1\nbase: small.yaml\nseeds: [0]\ncompare: {on: val.loss}\nvariants: {wide: {parametrization: mup}}\n"
)


def test_the_first_size_is_the_base_of_the_parametrization() -> None:
    """A base in the run is not replaced."""
    arms = arms_of(ONE_VARIANT + SIZES_BY_PATH)
    assert [arm.name for arm in arms.arms] == ["wide, d_model 16", "wide, d_model 32"]
    sets = ["model.d_model=32", "model.decoder.ffn.d_ff=80", "seed=0"]
    base = "parametrization={kind: mup, base: {model.d_model: 16, model.decoder.ffn.d_ff: 40}}"
    assert arms.runs(arms.arms[1])[0].run.digest == load_run("small.yaml", PLUGINS, sets=[*sets, base]).digest
    arms = arms_of(ONE_VARIANT.replace("mup", "{kind: mup, base: {model.d_model: 8}}") + SIZES_BY_PATH)
    assert set((arms.runs(arms.arms[1])[0].run.config.parametrization.base or {}).values()) == {8}


@pytest.mark.slow
def test_the_first_number_of_parameters_is_the_base_of_the_parametrization() -> None:
    rule = "parametrization: completep"
    arms = arms_of(ONE_VARIANT.replace("parametrization: mup", rule) + "sizes: {params: [6k, 20k]}\n")
    first, second = (arms.runs(arm)[0].run for arm in arms.arms)
    assert second.file.base is not None
    assert second.file.base.model == first.written.model
    assert first.written.model != second.written.model


def test_larger_sizes_have_the_values_of_the_smallest(monkeypatch: pytest.MonkeyPatch) -> None:
    """A remark about a value at an edge belongs to the size that was tuned."""
    Path("sweep.yaml").write_text(
        SWEEP + SIZES_BY_PATH + TUNE.replace("seeds", "at: smallest, seeds"), encoding="utf-8"
    )
    sweep = Sweep("sweep.yaml", PLUGINS, Path("out"))
    assert list(sweep._tunings) == [f"{variant}, d_model 16" for variant in ("relu", "swiglu", "deeper")]
    choice = sweep._tunings["relu, d_model 16"].trials[1].choice
    tuned = Tuned(choice.values, ("optimizer.lr",))
    monkeypatch.setattr(Tuning, "best", lambda self: (choice, tuned) if self.arm.variant == "relu" else None)
    assert sweep._chosen() == {
        "relu, d_model 16": (choice, tuned),
        "relu, d_model 32": (choice, replace(tuned, edge=())),
    }
    assert sweep._choices()["relu, d_model 32"].values == {"optimizer.lr": 1e-2}
    assert sweep._choices()["deeper, d_model 32"].values == {"optimizer.lr": 1e-3}
    words = "has no `parametrization`: the values tuned at its smallest size may not fit larger sizes"
    assert list(_transfer_remarks(sweep.arms, sweep._chosen())) == [f"relu {words}"]
    trial = TrialResult("deeper, d_model 16", {}, "", "val.loss", None, False, 1, 0)
    for diverged, reason in ((0, "is not tuned yet: trials are missing"), (1, "is not tuned: every trial diverged")):
        remark = _not_tuned(sweep.arms.arm("deeper, d_model 32"), [replace(trial, diverged=diverged)])
        assert remark.startswith(f"deeper, d_model 32 {reason}")
    rows = {row.name: row.runs for row in sweep.outline().rows if row.name.startswith("relu")}
    assert rows == {"relu, d_model 16, tuning": 2, "relu, d_model 16": 2, "relu, d_model 32": 2}


@pytest.mark.parametrize(
    ("text", "sets"),
    [
        ("", ["steps=9"]),
        ("grid: {steps: [8, 12]}\n", []),
        ("sizes: {steps: [8, 12]}\n", []),
        (TUNE.replace("optimizer.lr: [1e-3, 1e-2]", "steps: [8, 12]"), []),
    ],
)
def test_two_lengths_are_refused(text: str, sets: list[str]) -> None:
    Path("sweep.yaml").write_text(SWEEP + "tokens: 20 * params\n" + text, encoding="utf-8")
    with pytest.raises(SpecError, match="`steps` has no effect with the sweep's `tokens`"):
        Sweep("sweep.yaml", PLUGINS, Path("out"), sets=sets)


def test_the_base_may_be_the_only_variant() -> None:
    arms = arms_of("tfkit: 1\nbase: small.yaml\nseeds: [0]\ncompare: {on: val.loss}\n")
    assert [arm.name for arm in arms.arms] == ["base"]
    assert arms.runs(arms.arms[0])[0].run.digest == load_run("small.yaml", PLUGINS, sets=["seed=0"]).digest


@pytest.mark.parametrize("name", chosen(SWEEPS, {"minigpt"}))
def test_sweeps_that_come_with_tfkit(name: str) -> None:
    rows = Sweep(name, WITH_PLUGINS, Path("out")).outline().rows
    assert {row.parameters for row in rows} == SIZES[name]


def runs_of(arms: Arms, name: str) -> list[Path]:
    """The folders of all runs that an arm may need: trials and, whichever of them is the best, runs."""
    arm, combinations = arms.arm(name), all_choices(arms.file.tuned)
    return [
        sweep_run.folder
        for choice in combinations
        for sweep_run in (*arms.trial(arm, choice).runs, *arms.runs(arm, choice))
    ]


@pytest.mark.slow
def test_sweeps_share_runs() -> None:
    """Half of the runs of `recipe` are those of the SwiGLU of `architecture`."""
    architecture, recipe = (Sweep(name, PLUGINS, Path("out")).arms for name in ("architecture", "recipe"))
    assert runs_of(architecture, "swiglu") == runs_of(recipe, "constant")

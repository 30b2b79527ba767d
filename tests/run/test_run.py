"""The file of a run: valid settings, their meaning, and the errors of invalid settings."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator

import tfkit
from tests.run.training.runs import PLUGINS, RUN, TEXT, WITH_PLUGINS, small_run, write_run
from tfkit.errors import SpecError
from tfkit.plugin.known_specs import built_in_specs_folder
from tfkit.run.checked_run import load_run
from tfkit.run.run_spec import RunSpec, render_run
from tfkit.spec.schema import document_schema

from ..known import RUNS
from ..sampling import some

CHILD = "extends: small.yaml\nname: child\n"
WRONG = {
    "no_end": RUN.replace("steps: 8\n", ""),
    "two_ends": RUN + "epochs: 2\n",
    "no_model": RUN.replace(RUN[RUN.index("model:") : RUN.index("data:")], ""),
    "no_length": RUN.replace(", length: 12", ""),
    "a_length_without_effect": RUN.replace("{kind: text, files: sheep.txt}", "addition"),
    "misspelt_key": RUN.replace("optimizer:", "optimiser:"),
    "misspelt_kind": RUN.replace("kind: adamw", "kind: adamv"),
    "misspelt_file": RUN.replace("sheep.txt", "sheeps.txt"),
    "key_of_another_kind": RUN.replace("lr: 1e-2", "lr: 1e-2, momentum: 0.9"),
    "betas_of_one_number": RUN.replace("lr: 1e-2", "lr: 1e-2, betas: [0.9]"),
    "vocabulary": RUN.replace("data.vocab_size", "21"),
    "positions": RUN.replace("length: 12", "length: 13"),
    "unknown_split": RUN + "eval: {every: 2, splits: {test: all}}\n",
    "splits_of_too_much": RUN.replace("sheep.txt}", "sheep.txt, split: {train: 0.9, val: 0.2}}"),
    "split_too_short": RUN.replace("sheep.txt}", "sheep.txt, split: {train: 0.9999, val: 0.0001}}"),
    "warmup_too_long": RUN + "schedule: {kind: cosine, warmup: 9}\n",
    "warmup_and_decay": RUN + "schedule: {kind: wsd, warmup: 7, decay: 0.5}\n",
    "micro_batch": RUN + "machine: {micro_batch: 7}\n",
    "a_group_that_changes_nothing": RUN.replace("lr: 1e-2", "lr: 1e-2, groups: [{match: '*norm*'}]"),
    "a_rate_beyond_float32": RUN.replace("lr: 1e-2", "lr: 1e300"),
    "a_decay_beyond_float32": RUN.replace("lr: 1e-2", "lr: 1e-2, groups: [{match: '*norm*', weight_decay: 2e18}]"),
    "model_without_effect": RUN.replace("d_model: 16", "d_model: 16\n  n_kv_heads: 2"),
    "model_misspelt": CHILD + "model: {decoder: {n_layers: 3}}\n",
    "unknown_base": "extends: smal.yaml\nname: child\n",
    "model_of_no_name": CHILD + "model: gpt3\n",
}


@pytest.mark.parametrize("name", WRONG)
def test_errors(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Callable[..., None]) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    Path("wrong.yaml").write_text(WRONG[name], encoding="utf-8")
    with pytest.raises(SpecError) as raised:
        load_run("wrong.yaml", PLUGINS)
    golden(f"runs/errors/{name}", str(raised.value))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("[]", "`betas` must have 2 items; got 0"),
        ("[0.9, 0.95, 0.99]", "`betas` must have at most 2 items; got 3"),
        ("[[0.9], 0.95]", "an item of `betas` must be a number of at least 0 and below 1; got a list"),
        ("[null, 0.95]", "an item of `betas` must be a number of at least 0 and below 1; got null"),
        ("[1.5]", "`betas` must have 2 items; got 1"),
        ("null", "`betas` must be a list; got null"),
        ("{a: 0.9}", "`betas` must be a list; got a mapping"),
    ],
)
def test_errors_of_a_pair(value: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as error:
        load_run(write_run(tmp_path, RUN.replace("lr: 1e-2", f"lr: 1e-2, betas: {value}")), PLUGINS)
    assert message in [diagnostic.message for diagnostic in error.value.diagnostics]
    assert all(diagnostic.span and diagnostic.span.line == 14 for diagnostic in error.value.diagnostics)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("step=3", "the run has no key `step`"),
        ("model.decodr.n_layers=3", "the model has no node or key `decodr`"),
        ("model.decoder.ffn.kind=swigl", "unknown ffn kind `swigl`"),
        ("optimizer.lr=-1", "`lr` must be a number above 0"),
        ("schedule.warmup=steps * 2", "`warmup` must be at most the length of the run, 8 steps; got 16"),
    ],
)
def test_errors_of_changes(change: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        small_run(tmp_path, change)
    assert says in str(raised.value)
    assert "--set:1:" in str(raised.value)


def test_every_wrong_change_is_reported(tmp_path: Path) -> None:
    with pytest.raises(SpecError) as raised:
        small_run(tmp_path, "optimzer.lr=0.1", "steps=9", "shedule.warmup=2")
    assert [item.message for item in raised.value.diagnostics] == [
        "the run has no key `optimzer`",
        "the run has no key `shedule`",
    ]


def test_a_run_that_extends_another_changes_its_model(tmp_path: Path) -> None:
    write_run(tmp_path)
    path = tmp_path / "child.yaml"
    path.write_text(
        CHILD + "model: {graph: {decoder: {ffn: {kind: swiglu, d_ff: 24}, n_layers: 3}}}\nsteps: 5\n", encoding="utf-8"
    )
    run = load_run(path, PLUGINS)
    decoder = run.graph.node("decoder").config.model_dump(serialize_as_any=True)
    assert (decoder["n_layers"], decoder["ffn"]["kind"], decoder["attention"]["n_heads"]) == (3, "swiglu", 2)
    assert (run.steps, run.config.name, run.config.seed) == (5, "child", 3)
    path.write_text(CHILD + "model: {extends: nanogpt, vocab_size: data.vocab_size}\n", encoding="utf-8")
    assert load_run(path, PLUGINS).graph.spec.model.name == "nanogpt"
    path.write_text(CHILD, encoding="utf-8")
    changed = load_run(path, PLUGINS, sets=["model=nanogpt", "model.vocab_size=data.vocab_size"])
    assert changed.graph.spec.model.name == "nanogpt"


@pytest.mark.parametrize("base", [True, False])
def test_a_path_to_content_starts_at_the_file_that_contains_it(base: bool, tmp_path: Path) -> None:
    """And not at the file that contains another value of the same component."""
    folders = tmp_path / "bases", tmp_path / "runs"
    path, other = "teacher: models/t", "temperature: 3.5"
    for folder in folders:
        folder.mkdir()
    losses = [f"loss: {{kind: distillation, {path if base else 'teacher: old, ' + other}}}\n"]
    losses.append(f"loss: {{{other if base else path}}}\n")
    write_run(folders[0], RUN + losses[0])
    (folders[1] / "child.yaml").write_text(CHILD.replace("small", "../bases/small") + losses[1], encoding="utf-8")
    loss: Any = load_run(folders[1] / "child.yaml", PLUGINS).config.loss
    assert (loss.temperature, Path(loss.teacher).resolve()) == (3.5, (folders[0 if base else 1] / "models/t").resolve())


@pytest.mark.parametrize(
    ("value", "size"),
    [("data.vocab_size + 1", 28), ("2 * (data.vocab_size - 3) + d_model", 64), ("data.vocab_size", 27)],
)
def test_a_size_of_the_data_may_be_in_arithmetic(value: str, size: int, tmp_path: Path) -> None:
    write_run(tmp_path)
    text = "twice data.vocab_size - 1"
    run = load_run(tmp_path / "small.yaml", PLUGINS, sets=[f"model.vocab_size={value}", f"model.description={text}"])
    assert run.data.vocab_size == 27
    assert run.graph.node("head").output.width == size
    assert run.graph.spec.model.description == text


@pytest.mark.parametrize("word", ["all", "5"])
def test_the_batches_of_a_split_are_a_word_or_a_number(word: str, tmp_path: Path) -> None:
    """And a change reaches what the word stands for."""
    write_run(tmp_path, RUN + f"eval: {{every: 2, splits: {{val: {word}}}}}\n")
    (tmp_path / "child.yaml").write_text(CHILD + "eval: {splits: {val: {batches: 3}}}\n", encoding="utf-8")
    small, child = (load_run(tmp_path / name, PLUGINS) for name in ("small.yaml", "child.yaml"))
    run = load_run(tmp_path / "small.yaml", PLUGINS, sets=[f"eval.splits.val={{batches: {word}}}"])
    changed = load_run(tmp_path / "small.yaml", PLUGINS, sets=["eval.splits.val=all", "eval.splits.val.batches=3"])
    assert small.digest == run.digest != changed.digest == child.digest


def test_a_change_reaches_the_path_of_weights(tmp_path: Path) -> None:
    write_run(tmp_path, RUN + "weights: base\n")
    path = tmp_path / "child.yaml"
    for text, missing in [("{missing: ['head.*']}", ("head.*",)), ("{path: base, missing: [a]}", ("a",)), ("base", ())]:
        path.write_text(CHILD + f"weights: {text}\n", encoding="utf-8")
        weights = load_run(path, PLUGINS).config.weights
        assert weights is not None
        assert (Path(weights.path).name, weights.missing) == ("base", missing)
    path.write_text(CHILD + "weights: {missing: ['head.*']}\n", encoding="utf-8")
    weights = load_run(path, PLUGINS, sets=["weights.path=other"]).config.weights
    assert weights is not None
    assert (Path(weights.path).name, weights.missing) == ("other", ("head.*",))


@pytest.mark.parametrize("end", ["tokens=144", "epochs=0.02", "steps=2"])
def test_another_end_replaces_the_former_one(end: str, tmp_path: Path) -> None:
    name, _, value = end.partition("=")
    (tmp_path / "child.yaml").write_text(f"extends: small.yaml\n{name}: {value}\n", encoding="utf-8")
    changed = load_run(write_run(tmp_path), PLUGINS, sets=[end])
    child = load_run(tmp_path / "child.yaml", PLUGINS)
    assert changed.steps == child.steps < 8
    arguments = [item for item in ("steps", "tokens", "epochs", "flops") if getattr(child.config, item) is not None]
    assert arguments == [name]


def test_null_for_another_end_keeps_the_former_one(tmp_path: Path) -> None:
    (tmp_path / "child.yaml").write_text("extends: small.yaml\ntokens: null\n", encoding="utf-8")
    changed = load_run(write_run(tmp_path), PLUGINS, sets=["tokens=null"])
    assert changed.steps == load_run(tmp_path / "child.yaml", PLUGINS).steps == 8


def test_steps_follow_from_tokens_and_passes(tmp_path: Path) -> None:
    path = write_run(tmp_path, RUN.replace("steps: 8", "tokens: 73"))
    assert load_run(path, PLUGINS).steps == 2
    path = write_run(tmp_path, RUN.replace("steps: 8", "epochs: 1"))
    windows = -(-(int(0.9 * len(TEXT)) - 1) // 12)
    assert load_run(path, PLUGINS).steps == -(-windows // 6)


def test_what_changes_the_meaning_of_a_run(tmp_path: Path) -> None:
    digest = small_run(tmp_path).digest
    spaced = RUN.replace(": ", ":   ").replace("\n", "  # a comment\n")
    assert load_run(write_run(tmp_path, spaced), PLUGINS).digest == digest
    for same in ("name=other", "machine={threads: 2, micro_batch: 1}", "track=tensorboard", "description=text"):
        assert small_run(tmp_path, same).digest == digest, same
    for other in ("seed=4", "steps=9", "optimizer.lr=2e-2", "model.dropout=0.1", "clip=1", "batch.length=11"):
        assert small_run(tmp_path, other).digest != digest, other
    path = write_run(tmp_path)
    (tmp_path / "sheep.txt").write_text(TEXT.replace("went", "wetn", 1), encoding="utf-8")
    assert load_run(path, PLUGINS).digest != digest


def test_the_text_of_a_run_gives_the_same_run(tmp_path: Path) -> None:
    run = small_run(
        tmp_path, "callbacks={kind: stop_at, below: 1}", "schedule=wsd", "eval={every: 2, splits: {val: all}}"
    )
    path = tmp_path / "again.yaml"
    path.write_text(render_run(run.config, run.graph.spec), encoding="utf-8")
    again = load_run(path, PLUGINS)
    assert again.digest == run.digest
    assert again.config == run.config


NOT_IN_A_SCHEMA = ("vocabulary", "positions", "warmup", "split", "micro", "misspelt_file", "unknown", "two", "no_end")


@pytest.fixture(scope="module")
def schema() -> Draft202012Validator:
    return Draft202012Validator(document_schema(RunSpec, PLUGINS))


@pytest.mark.parametrize("name", [name for name in WRONG if not name.startswith(NOT_IN_A_SCHEMA)])
def test_an_editor_finds_errors_of_one_field(name: str, schema: Draft202012Validator) -> None:
    relations = ("no_length", "a_length_without_effect", "a_group_that_changes_nothing", "model_of_no_name")
    assert schema.is_valid(yaml.safe_load(WRONG[name])) == (name in relations or name.endswith("_beyond_float32"))


@pytest.mark.parametrize("more", ["", "callbacks: spikes\ntrack: [tensorboard]\n"])
def test_an_editor_accepts_what_tfkit_accepts(more: str, schema: Draft202012Validator) -> None:
    schema.validate(yaml.safe_load(RUN + more))


@pytest.mark.parametrize(
    "path", some(sorted((built_in_specs_folder() / "runs").glob("*.yaml")), 2), ids=lambda path: path.stem
)
def test_an_editor_accepts_what_comes_with_tfkit(path: Path) -> None:
    schema = Draft202012Validator(document_schema(RunSpec, WITH_PLUGINS))
    schema.validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    run = load_run(path, WITH_PLUGINS)
    schema.validate(yaml.safe_load(render_run(run.config, run.graph.spec)))


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("minigpt")])
def test_a_published_experiment_has_its_parameters_and_characters(name: str) -> None:
    run = load_run(f"runs/{name}", PLUGINS)
    assert sum(parameter.numel() for parameter in tfkit.build(run.graph, device="meta").parameters()) == 913_601
    assert run.data.vocab_size == 65
    assert len(run.data.examples("train", "sampled")) == 1_003_854 - 128
    assert len(run.data.examples("val", "sampled")) == 111_540 - 128

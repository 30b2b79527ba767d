"""Valid runs with a random mistake: rejected with a location, or still valid, with a step that runs.

The text of a run that is accepted is compared with its values here, apart from the resolver; then a small one is built
and trained for a step.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import tfkit
from tests.run.training.runs import PLUGINS, RUN, Memory, trained, write_run
from tests.spec.test_mutations import MUTATIONS, SETTINGS, VALUES, compare, compare_field, misplaced_key, mutants_of
from tfkit.run.checked_run import Run, load_run
from tfkit.run.read_run import SIZES
from tfkit.run.run_spec import LISTS, RunSpec
from tfkit.run.training.loop import Trainer
from tfkit.spec.document import MODEL
from tfkit.spec.source import parse, plain_data
from tfkit.tools.cost.of_run import flops_of_step

PARTS = """\
eval: {every: 4, splits: {val: all, train: {batches: 2}}, metrics: [loss, accuracy, bits_per_byte]}
checkpoint: {every: 3, last: 1}
callbacks: [{kind: spikes, window: 3, deviations: 4.5}, {kind: stop_at, metric: val.loss, below: 0.5}]
machine: {device: cpu, micro_batch: 3, threads: 1}
schedule: {kind: wsd, warmup: 2, decay: 0.25}
clip: 1.0
nonfinite: {skip: 2}
"""
GROUPS = "groups: [{match: '*.ffn.*', lr: 1e-3}, {match: 'head.*', weight_decay: 0}]"
RICH = RUN.replace("lr: 1e-2", f"lr: 1e-2, betas: [0.8, 0.9], weight_decay: 0.1, {GROUPS}") + PARTS
ADDITION = """\
tfkit: 1
name: sums
model:
  vocab_size: data.vocab_size
  d_model: 16
  graph:
    embedding: {block: embedding, position: {kind: learned, max_len: 8}}
    decoder: {block: decoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
    head: lm_head
data: {kind: addition, digits: 1, split: {train: 0.75, val: 0.25}, order: sampled, loss_on: all}
batch: {sequences: 8}
tokens: 400
optimizer: {kind: sgd, lr: 0.1, momentum: 0.9, nesterov: true}
schedule: {kind: cosine, warmup: 0.1, end: 0.2}
precision: bfloat16
loss: {kind: cross_entropy, label_smoothing: 0.1}
eval: {every: 20, splits: {val: all}, metrics: [exact_match]}
"""
CHILD = """\
extends: small.yaml
name: child
weights: {path: base.safetensors, missing: ["head.*"], unused: ["head.*"]}
freeze: ["embedding.*"]
model: {name: wider, graph: {head: {bias: true}}}
epochs: 0.5
steps: null
track: []
"""
PACKED = """\
extends: small.yaml
name: packed
model: {graph: {embedding: {position: null}, decoder: {attention: {position: alibi}}}}
data: {kind: packed, of: {kind: text, files: sheep.txt}, separator: "."}
flops: 1e6
steps: null
"""
TEXTS = [RUN, RICH, ADDITION, CHILD, PACKED]
FIELDS = sorted({*RunSpec.model_fields, "micro_batch", "sequences", "length", "every", "splits", "skip", "kind"})
PATHS = {"weights": "path", "branch": "run", "data": "files"}
MAX_TOKENS = 4096
"""Positions of a step, and parameters in thousands, of a run that is tried."""


MUTANTS = mutants_of(st.sampled_from(TEXTS), [*MUTATIONS, misplaced_key(FIELDS, VALUES)])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from safetensors.torch import save_file

    from tests.run.training.runs import small_run

    folder = tmp_path_factory.mktemp("runs")
    _, weights = trained(small_run(folder))
    save_file(weights, folder / "base.safetensors")
    return folder


def check(text: str, folder: Path) -> bool:
    """Whether the text is accepted; fails if it is neither refused properly nor right."""
    write_run(folder)
    path = folder / "mutant.yaml"
    path.write_text(text, encoding="utf-8")
    try:
        run = load_run(path, PLUGINS, count=flops_of_step)
    except tfkit.SpecError as error:
        check_refusal(error)
        return False
    check_text(text, run)
    if is_small(run):
        try:
            Trainer(run, Memory(), until=1).train()
        except tfkit.SpecError as error:
            if "not finite" not in str(error):
                check_refusal(error)
    return True


def check_refusal(error: tfkit.SpecError) -> None:
    assert all(line.isprintable() for line in str(error).split("\n"))
    for diagnostic in error.diagnostics:
        assert diagnostic.message
        assert diagnostic.span, diagnostic.message
        assert diagnostic.span.line > 0
        assert diagnostic.span.column > 0


def check_text(text: str, run: Run) -> None:
    """Everything that the text says is in the run."""
    data = plain_data(parse(text, "run"))
    merged = data.pop("extends", None) is not None
    model = data.pop(MODEL, {})
    for key, value in data.items():
        assert key in RunSpec.model_fields, f"{key} is no key of runs"
        part = [value] if key in LISTS and not isinstance(value, list) and value is not None else value
        if merged and (part is None or isinstance(part, Mapping)):
            continue  # a mapping is merged with the mapping of the other run, and null removes its key
        compare_field(_without_paths(key, part), run.config, key, "")
    if isinstance(model, Mapping) and "extends" not in model and not merged:
        _compare_model(model, run)


def _without_paths(key: str, part: Any) -> Any:
    """A value without paths, which are made absolute."""
    if key in ("weights", "branch") and isinstance(part, str):
        return None if part == "none" else {}
    if key in PATHS and isinstance(part, dict):
        return {name: value for name, value in part.items() if name != PATHS[key]}
    return part


def _compare_model(model: Mapping[str, Any], run: Run) -> None:
    actual, inherited = run.graph.spec.model, set(run.graph.spec.provenance.inherited.values())
    for key, value in model.items():
        if isinstance(value, str) and value in SIZES:
            continue
        part = dict.fromkeys(value, "tokens") if key == "inputs" and isinstance(value, list) else value
        if key in type(actual).model_fields:
            compare(part, getattr(actual, key), key)
        else:
            assert (key,) in inherited, f"{key} is taken by nobody"


def is_small(run: Run) -> bool:
    """True if a step takes little time."""
    config = run.config
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = tfkit.build(run.graph, device="meta")
    read = config.eval.splits.values() if config.eval else ()
    return (
        run.tokens_of_step < MAX_TOKENS
        and config.machine.threads <= 2
        and config.machine.device == "cpu"
        and not config.machine.compile
        and sum(parameter.numel() for parameter in model.parameters()) < MAX_TOKENS * 1000
        and len(list(model.modules())) < 200
        and all(split.batches == "all" or split.batches < 4 for split in read)
    )


pytestmark = pytest.mark.filterwarnings("ignore::tfkit.errors.SpecWarning", "ignore::tfkit.errors.FirstLossWarning")


@pytest.mark.parametrize("text", TEXTS, ids=["run", "rich", "addition", "child", "packed"])
def test_the_originals_are_right(text: str, folder: Path) -> None:
    assert check(text, folder)


@settings(SETTINGS, max_examples=60, derandomize=True)
@given(MUTANTS)
def test_mutants_of_runs(folder: Path, text: str) -> None:
    check(text, folder)


@pytest.mark.slow
@settings(SETTINGS, max_examples=3000)
@given(MUTANTS)
def test_many_mutants_of_runs(folder: Path, text: str) -> None:
    check(text, folder)


@pytest.mark.parametrize(
    "spoil", [lambda text: text.replace("steps: 8", "steps: 9"), lambda text: text.replace("lr: 1e-2", "lr: 1e-3")]
)
def test_the_oracle_sees_a_run_that_means_something_else(spoil: Callable[[str], str], folder: Path) -> None:
    run = load_run(write_run(folder), PLUGINS)
    with pytest.raises(AssertionError):
        check_text(spoil(RUN), run)

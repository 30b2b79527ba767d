"""Losses of docs/custom_objectives.md and of tfkit: resumed, in micro-batches, in two processes, and checked."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest

from tfkit.cli import main

from .launches import forked, numbers, options, tensors
from .runs import PLUGIN_OPTIONS, same, write_objectives

pytestmark = pytest.mark.slow
STEPS = 8
ROOM = "model.graph.embedding.position.max_len=33"
"""The sequence of masked diffusion includes the last target."""
SIMPO = "{kind: preferences, form: simpo, beta: 2.0}"
LOSSES = {
    "llada": "small.yaml",
    "data2vec": "small.yaml",
    "{kind: masked_diffusion}": "small.yaml",
    "velocity": "dit_shapes",
    "{kind: flow_matching, label: label, drop: 0.3}": "dit_shapes",
    "{kind: jepa, grid: [4, 4], momentum: 0.9}": "jepa_shapes",
    "grpo": "gpt.yaml",
    "dpo": "sums.yaml",
    SIMPO: "sums.yaml",
    "{kind: preferences, form: ipo, reference: start}": "sums.yaml",
}


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files of the page, and a trained model with another seed, `start`."""
    folder = write_objectives(tmp_path_factory.mktemp("objectives"))
    _train(folder, "start", SIMPO, 1, "seed=5", "steps=3")
    return folder


def _train(folder: Path, name: str, loss: str, processes: int, *sets: str, stop_after: int = STEPS) -> Path:
    run, common = LOSSES[loss], [f"loss={loss}"]
    if run in ("dit_shapes", "jepa_shapes"):
        common += ["data.count=60", "batch.sequences=6", "schedule=constant"]
    if run == "sums.yaml":
        common += ["batch.sequences=6", "schedule=constant"]
    if "masked_diffusion" in loss:
        common += [ROOM]
    if loss == "dpo":
        common += ["weights=start"]
    metrics = "eval={every: 4, splits: {val: {batches: 2}}, metrics: [objective]}"
    common += [f"steps={STEPS}", "checkpoint={every: 1}", metrics, *sets]
    arguments = [*PLUGIN_OPTIONS[1:], "--plugin-dir", "plugins", run, "-o", name, "--stop-after", str(stop_after)]
    if processes > 1:
        forked(folder, processes, *arguments, *options(*common))
    else:
        with contextlib.chdir(folder):
            assert main(["train", "--no-plugins", *arguments, *options(*common)]) == 0
    return folder / name


def _numbers(folder: Path) -> list[dict[str, float]]:
    """Return the numbers of all lines, without notes."""
    return [{key: value for key, value in line.items() if not isinstance(value, str)} for line in numbers(folder)]


@pytest.mark.parametrize("loss", LOSSES)
def test_a_run_resumes_and_does_not_depend_on_micro_batches_and_processes(
    loss: str, page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "".join(filter(str.isalnum, loss))
    full = _train(page, f"{name}-full", loss, 1)
    losses = [line["loss"] for line in numbers(full) if "loss" in line]
    assert len(losses) == STEPS
    if loss == "dpo":
        assert losses[0] == pytest.approx(0.6931472)
        assert losses[1] != losses[0]
    for stop in (3, STEPS):
        resumed = _train(page, f"{name}-resumed", loss, 1, stop_after=stop)
    for file in ("model", "state", "optimizer"):
        if (full / f"step-{STEPS}" / f"{file}.safetensors").exists():
            assert same(tensors(resumed, file), tensors(full, file))
    assert numbers(resumed) == numbers(full)
    for other, processes, sets in (("micro", 1, ["machine.micro_batch=1"]), ("two", 2, [])):
        folder = _train(page, f"{name}-{other}", loss, processes, *sets)
        for ours, theirs in zip(_numbers(folder), _numbers(full), strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)
            if "loss" in theirs:
                assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-6, abs=1e-6)

    further = {"dpo": ["weights=start"], "{kind: masked_diffusion}": [ROOM]}
    sets = options(f"loss={loss}", *further.get(loss, []))
    if loss == "grpo":  # generates in each of hundreds of steps
        sets += [word for name in ("steps", "sums", "resume") for word in ("--only", name)]
    with contextlib.chdir(page):
        assert main(["check", LOSSES[loss], *PLUGIN_OPTIONS, "--plugin-dir", "plugins", *sets]) == 0
    out = capsys.readouterr().out
    assert "as a reduced run" in out

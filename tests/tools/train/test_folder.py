"""The run folder: after a kill at any moment, it continues to equal bytes, and never holds a different run."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from threading import Event, current_thread, main_thread

import pytest
from safetensors.torch import load_file

import tfkit
from tests.run.training.runs import PLUGINS, TEXT, write_run
from tfkit.cli import main
from tfkit.run.checked_run import load_run
from tfkit.run.training import processes
from tfkit.run.training.checkpoint import Checkpoint
from tfkit.run.training.loop import Trainer
from tfkit.tools.train.record import RunFolder

SETS = [
    "--set",
    "steps=12",
    "--set",
    "checkpoint={every: 3, last: 2}",
    "--set",
    "eval={every: 4, splits: {val: all}}",
    "--set",
    "callbacks=[{kind: samples, every: 5, prompt: 'goats', tokens: 5}, {kind: spikes, window: 3}]",
    "--set",
    "model.dropout=0.1",
]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(tmp_path)
    monkeypatch.chdir(tmp_path)


def train(folder: str, *more: str) -> int:
    return main(["train", "small.yaml", "-o", folder, *SETS, *more])


TIMES = ("run.json", "report.html")
"""Files that say when and where a run was made."""


def contents(folder: str) -> dict[str, object]:
    """All that two equal runs have in common to the last byte."""
    paths = [path for path in sorted(Path(folder).rglob("*")) if path.is_file() and path.name not in TIMES]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def test_a_thread_writes_the_checkpoint_of_its_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: each checkpoint is written only after the next step, and has the bytes of that step."""
    assert train("alone") == 0
    monkeypatch.setattr(processes, "is_on_accelerator", lambda _: True)
    trained, threads = Event(), list[bool]()
    saving, save, update = RunFolder.saving, RunFolder._save, Trainer._update

    def begins(self: RunFolder) -> Callable[[Checkpoint], None]:
        trained.clear()
        return saving(self)

    def late(self: RunFolder, position: int, digest: str, checkpoint: Checkpoint) -> None:
        threads.append(current_thread() is not main_thread())
        assert checkpoint.step == 12 or trained.wait(60)
        save(self, position, digest, checkpoint)

    def updated(self: Trainer) -> None:
        update(self)
        trained.set()

    monkeypatch.setattr(RunFolder, "saving", begins)
    monkeypatch.setattr(RunFolder, "_save", late)
    monkeypatch.setattr(Trainer, "_update", updated)
    assert train("thread") == 0
    assert threads == [True] * 4
    assert contents("thread") == contents("alone")


def test_each_checkpoint_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that ends at a checkpoint, or where it continued, does not write it again."""
    save, steps = RunFolder._save, list[int]()
    monkeypatch.setattr(RunFolder, "_save", lambda *args: (steps.append(args[-1].step), save(*args)))
    for until in ("3", "3", "4"):
        assert train("once", "--stop-after", until) == 0
    assert steps == [3, 4]


def test_a_thread_that_cannot_write_ends_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(processes, "is_on_accelerator", lambda _: True)

    def full(*_: object) -> None:
        raise tfkit.SpecError(tfkit.Diagnostic("no space left on device"))

    monkeypatch.setattr(RunFolder, "_save", full)
    assert train("full") == 1
    assert capsys.readouterr().err.endswith("error: no space left on device\n")
    assert not list(Path("full").glob("step-*"))


def test_a_run_leaves_a_record(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    assert train("out", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert result["ended"] == "finished"
    assert result["step"] == 12
    assert sorted(path.name for path in Path("out").iterdir()) == sorted(
        ["latest", "lock", "metrics.jsonl", "report.html", "run.json", "run.yaml", "step-12", "step-9"]
    )
    facts = json.loads(Path("out/run.json").read_text(encoding="utf-8"))
    assert facts["ended"] == "finished"
    assert facts["meaning"]["steps"] == 12
    assert facts["sessions"][0]["step"] == 12
    golden("runs/resolved", Path("out/run.yaml").read_text(encoding="utf-8").replace(os.getcwd(), "..."))
    before = contents("out")
    assert train("out") == 0
    assert "is complete: finished after step 12" in capsys.readouterr().out
    assert contents("out") == before
    assert main(["train", "out"]) == 0  # the folder is a run too, of the same meaning
    assert contents("out") == before


def test_other_commands_read_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("out") == 0
    capsys.readouterr()
    assert main(["generate", "out", "--prompt", "3 sheep", "--max-new-tokens", "4", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["texts"][0]["text"]) == 4
    assert main(["params", "out"]) == 0
    assert main(["save", "out", "-o", "saved", "--layout", "tfkit"]) == 0
    assert Path("saved/chars.json").read_bytes() == Path("out/step-12/chars.json").read_bytes()
    capsys.readouterr()
    assert main(["eval", "out", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["out"]["val.loss"]
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert report == pytest.approx(lines[-1]["val.loss"], abs=1e-6)


def edited(folder: Path, **values: object) -> None:
    """Change values of the meaning in a folder; None takes one out."""
    facts = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    expected = {name: value for name, value in {**facts["meaning"], **values}.items() if value is not None}
    (folder / "run.json").write_text(json.dumps({**facts, "digest": "0" * 32, "meaning": expected}), encoding="utf-8")


def test_a_folder_from_before_a_field_existed_continues(capsys: pytest.CaptureFixture[str]) -> None:
    assert train("out", "--stop-after", "4") == 0
    edited(Path("out"), **{"optimizer.eps": None, "model.graph.decoder.dropout": 0.1})
    assert train("out") == 0
    assert "continued after step 4" in capsys.readouterr().err
    assert json.loads(Path("out/run.json").read_text(encoding="utf-8"))["meaning"]["optimizer.eps"] == 1e-8


def test_a_folder_with_another_default_is_that_of_another_run(
    capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]
) -> None:
    assert train("out", "--stop-after", "4") == 0
    edited(Path("out"), **{"optimizer.eps": 1e-6, "optimizer.gone": False})
    capsys.readouterr()
    assert train("out") == 1
    golden("runs/errors/another_default", capsys.readouterr().err)


def test_a_folder_that_is_named_by_the_digest_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "small.yaml", *SETS, "--stop-after", "4"]) == 0
    (folder,) = Path("runs").iterdir()
    assert folder.name == f"small-{load_run(folder, PLUGINS).digest[:8]}"
    assert main(["train", "small.yaml", *SETS]) == 0
    assert list(Path("runs").iterdir()) == [folder]
    assert "continued after step 4" in capsys.readouterr().err


@pytest.mark.parametrize("steps", [[1, 9], pytest.param([1, 4, 9, 11], marks=pytest.mark.slow)])
def test_interrupted_between_steps_it_continues_to_the_same_bytes(steps: list[int]) -> None:
    assert train("whole") == 0
    for step in steps:
        assert train("parts", "--stop-after", str(step)) == 0
    assert train("parts") == 0
    uninterrupted, parts = contents("whole"), contents("parts")
    assert all(uninterrupted[name] == parts[name] for name in uninterrupted if not name.startswith("step-9/"))
    facts = json.loads(Path("parts/run.json").read_text(encoding="utf-8"))
    assert [session["step"] for session in facts["sessions"]] == [*steps, 12]


def test_what_was_written_after_the_checkpoint_is_forgotten() -> None:
    assert train("whole") == 0
    assert train("out", "--stop-after", "7") == 0
    with Path("out/metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 8, "loss": 1')
    Path("out/.step-8.0123abcd.new").mkdir()
    Path("out/step-999.tmp").mkdir()
    assert train("out") == 0
    assert Path("out/metrics.jsonl").read_bytes() == Path("whole/metrics.jsonl").read_bytes()
    assert not list(Path("out").glob(".*"))


@pytest.mark.slow
def test_a_signal_to_end_writes_a_checkpoint() -> None:
    words = ["train", "small.yaml", "-o", "out", *SETS, "--set", "steps=100000", "--set", "eval=null"]
    process = subprocess.Popen([sys.executable, "-m", "tfkit", *words], stderr=subprocess.DEVNULL)
    while not Path("out/latest").exists():
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 0
    facts = json.loads(Path("out/run.json").read_text(encoding="utf-8"))
    assert facts["sessions"][0]["ended"] == "interrupted"
    assert facts["ended"] is None
    assert Path("out/latest").read_text(encoding="utf-8").strip() == f"step-{facts['sessions'][0]['step']}"


def test_errors_of_folders(golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]) -> None:
    def error(*words: str) -> str:
        assert main(["train", "small.yaml", *words]) == 1
        return capsys.readouterr().err

    assert train("out", "--stop-after", "3") == 0
    capsys.readouterr()
    changed = [*SETS, "--set", "optimizer.lr=1", "--set", "model.decoder.ffn.kind=gelu"]
    golden("runs/another", error("-o", "out", *changed))
    Path("sheep.txt").write_text(TEXT.replace("went", "wenT"), encoding="utf-8")
    golden("runs/data_changed", error("-o", "out", *SETS))
    Path("full").mkdir()
    Path("full/thesis.tex").touch()
    golden("runs/not_a_run", error("-o", "full"))
    assert os.listdir("full") == ["thesis.tex"]
    Path("sheep.txt").write_text(TEXT, encoding="utf-8")
    weights = Path("out/step-3/model.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1])
    golden("runs/checkpoint_damaged", error("-o", "out", *SETS))
    Path("out/run.json").write_text("{", encoding="utf-8")
    assert "cannot read `out/run.json`" in error("-o", "out", *SETS)


@pytest.mark.slow
def test_a_full_disk_is_said_and_the_run_goes_on_when_there_is_room(capsys: pytest.CaptureFixture[str]) -> None:
    long = ["train", "small.yaml", "-o", "out", "--set", "steps=300"]
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (16384, hard))
    try:
        assert main(long) == 1
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert capsys.readouterr().err == "error: cannot write `out/metrics.jsonl`: File too large\n"
    assert main(long) == 0
    assert len(Path("out/metrics.jsonl").read_text(encoding="utf-8").splitlines()) == 300


def test_one_process_at_a_time(capsys: pytest.CaptureFixture[str]) -> None:
    from tfkit.tools.train.record import locked_folder

    with locked_folder(Path("out")):
        assert train("out") == 1
    assert "another process trains in `out`" in capsys.readouterr().err


EMA = "{kind: ema, decay: 0.9}"


def weights(folder: str) -> dict[str, bytes]:
    tensors = load_file(next(iter(Path(folder).glob("*.safetensors"))))
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def test_settings_that_change_no_weight_change_in_place(capsys: pytest.CaptureFixture[str]) -> None:
    """Callbacks continue with their states, although their indices change; of two of a kind, each with its own."""
    spikes = ", ".join(f"{{kind: spikes, window: {window}}}" for window in (2, 5))
    final = ["--set", f"callbacks=[{spikes}, {EMA}]", "--set", "eval.every=3"]
    final += ["--set", "checkpoint.every=null", "--set", "nonfinite.skip=1", "--set", "steps=6"]
    assert train("whole", *final) == 0
    assert train("out", "--set", f"callbacks=[{EMA}, {spikes}]", "--set", "steps=6", "--stop-after", "4") == 0
    other = load_run("small.yaml", PLUGINS, sets=[*SETS[1::2], "steps=6", "eval.every=5"])
    RunFolder(Path("out"), other, {}, {}).begin("killed before its first checkpoint", "", {})
    capsys.readouterr()
    assert train("out", *final) == 0
    assert "changed: eval.every: 5 -> 3" in capsys.readouterr().err
    assert weights("out/step-6") == weights("whole/step-6")
    assert weights("out/ema") == weights("whole/ema")
    states, expected = (
        json.loads(Path(name, "step-6/state.json").read_text())["callbacks"] for name in ("out", "whole")
    )
    assert states == expected
    facts, expected = (json.loads(Path(name, "run.json").read_text()) for name in ("out", "whole"))
    assert (facts["digest"], facts["meaning"]) == (expected["digest"], expected["meaning"])
    changes = [session.get("changed", []) for session in facts["sessions"]]
    assert [[text for text in texts if text.startswith("eval")] for texts in changes] == [
        [],
        ["eval.every: 4 -> 5"],
        ["eval.every: 5 -> 3"],
    ]
    assert Path("out/run.yaml").read_bytes() == Path("whole/run.yaml").read_bytes()
    lines = [json.loads(line) for line in Path("out/metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "val.loss" in line] == [0, 6]
    assert train("out", *final, "--set", "eval.every=6") == 1
    assert "has finished, and eval.every would have no effect" in capsys.readouterr().err


def test_a_run_that_a_callback_ended_continues_without_the_callback(capsys: pytest.CaptureFixture[str]) -> None:
    stop = ["--set", "callbacks={kind: stop_at, metric: val.loss, below: 100}"]
    assert train("out", *stop) == 0
    assert json.loads(Path("out/run.json").read_text())["ended"] not in (None, "finished")
    assert train("out", *stop, "--set", "optimizer.lr=1") == 1
    assert train("out", "--set", "callbacks=[]", "--stop-after", "1") == 0
    assert Path("out/latest").read_text() == "step-1\n"

"""Damaged or edited run folders: the run continues to equal bits, or an error is raised and no file is removed."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import fx
from torch.testing._internal.distributed.fake_pg import FakeStore

import tfkit
from tests.run.training.runs import PLUGINS, small_run
from tfkit.building.builder import build
from tfkit.cli import main
from tfkit.errors import ChangedWeightsWarning, Diagnostic, SpecError
from tfkit.run.checked_run import Run
from tfkit.run.training.checkpoint import Checkpoint
from tfkit.run.training.parallel import Together
from tfkit.spec import weight_files
from tfkit.spec.folder import FACTS, LATEST, WEIGHTS
from tfkit.spec.header import read_header
from tfkit.spec.weight_files import content_of
from tfkit.tools.common.history import METRICS
from tfkit.tools.eval_.evaluation import evaluate_run
from tfkit.tools.train import checkpoints
from tfkit.tools.train import record as record_module
from tfkit.tools.train.record import Follower, RunFolder
from tfkit.tools.train.train import train_run

from ...sampling import chosen, spread
from .test_folder import contents

SETS = ["steps=6", "checkpoint={every: 2, last: 2}", "callbacks=[{kind: spikes, window: 2}]"]
NEWEST, OLDER = "step-5", "step-4"
STATE, MODEL, OPTIMIZER = (f"{NEWEST}/{name}" for name in (checkpoints.STATE, WEIGHTS, checkpoints.OPTIMIZER))
OFFSETS = (0, 9, -9, -1)
Tamper = Callable[[Path], object]
CONTINUES = ""
RESUME = f"cannot resume from the checkpoint `FOLDER/{NEWEST}`: "


# ---- ways to tamper with a file of the folder ----


def write(name: str, content: bytes) -> Tamper:
    return lambda folder: (folder / name).write_bytes(content)


def edit(name: str, change: Callable[[bytes], bytes]) -> Tamper:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


def flip(name: str, index: int) -> Tamper:
    """Flip a bit of one byte."""

    def change(content: bytes) -> bytes:
        changed = bytearray(content)
        changed[index] ^= 4
        return changed

    return edit(name, change)


def take(name: str, source: str) -> Tamper:
    """Take a file from another folder."""
    return lambda folder: shutil.copyfile(folder / source / Path(name).name, folder / name)


def replace(name: str, make: Callable[[Path], object]) -> Tamper:
    def tamper(folder: Path) -> None:
        (folder / name).unlink()
        make(folder / name)

    return tamper


def of_another_run(folder: Path) -> None:
    """Take everything that a checkpoint refers to from another run."""
    shutil.copytree(f"other/{NEWEST}", folder / NEWEST, dirs_exist_ok=True)
    shutil.copyfile(f"other/{METRICS}", folder / METRICS)


def fields(name: str, *, sealed: bool = False, **values: Any) -> Tamper:
    """Set fields of a JSON file, without those that are `...`; `sealed` also renews its digest."""

    def tamper(folder: Path) -> None:
        data = {**json.loads((folder / name).read_bytes()), **values}
        data = {key: value for key, value in data.items() if value is not ...}
        if sealed:
            data["digest"] = checkpoints._digest_of({key: value for key, value in data.items() if key != "digest"})
        (folder / name).write_text(json.dumps(data), encoding="utf-8")

    return tamper


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], object]) -> Tamper:
    def tamper(folder: Path) -> None:
        loaded = {key: tensor.clone() for key, tensor in load_file(folder / name).items()}
        change(loaded)
        save_file(loaded, folder / name)

    return tamper


def cast(dtype: torch.dtype) -> Callable[[dict[str, torch.Tensor]], object]:
    return lambda loaded: loaded.update({name: tensor.to(dtype) for name, tensor in loaded.items()})


# ---- the cases: what is done, and what the error says; `CONTINUES` if there must be none ----


def unreadable(name: str, error: str) -> dict[str, tuple[Tamper, str]]:
    ways: dict[str, Tamper] = {
        "missing": lambda folder: (folder / name).unlink(),
        "empty": write(name, b""),
        "cut in half": edit(name, lambda content: content[: len(content) // 2]),
        "a folder": replace(name, os.mkdir),
        "a pipe": replace(name, os.mkfifo),
        "a dangling link": replace(name, lambda path: path.symlink_to("nowhere")),
    }
    return {f"{name} is {kind}": (tamper, error) for kind, tamper in ways.items()}


def invalid_fields(name: str, names: list[str], values: list[Any], error: str) -> dict[str, tuple[Tamper, str]]:
    cases = {f"{name} without {field}": (fields(name, **{field: ...}), f"`{field}` is missing") for field in names}
    for value in values:
        cases |= {f"{name} with {field} {value!r}": (fields(name, **{field: value}), error) for field in names}
    return cases


CHANGED = "was changed after it was written"
TENSORS = "were changed after the checkpoint was written"
STATES = {
    **unreadable(STATE, RESUME),
    **invalid_fields(STATE, list(checkpoints.CheckpointState.model_fields), [[[1]], 1.5, "6"], RESUME),
    f"{STATE} without digests": (fields(STATE, digests=...), CHANGED),  # as in checkpoints of earlier versions
    "state is a list": (write(STATE, b"[]"), "its JSON is not an object"),
    "state without all": (write(STATE, b"{}"), "`format` is missing"),
    "state is binary": (write(STATE, bytes(range(256))), "its JSON is not UTF-8"),
    "state is nested": (write(STATE, b"[" * 100_000), "its JSON is nested too deeply"),
    "state with a blank at its end": (edit(STATE, lambda content: content + b"\n"), CONTINUES),
    "state with a brace at its end": (edit(STATE, lambda content: content + b"}"), "its JSON is broken"),
    "state with a field of a later version": (fields(STATE, more=1), "`more` is unknown to this version of tfkit"),
    "state of step 4": (take(STATE, f"../part/{OLDER}"), "belongs to step 4"),
    "state of another run": (take(STATE, f"../other/{NEWEST}"), "it belongs to a different run"),
    "checkpoint and metrics of another run": (of_another_run, "it belongs to a different run"),
    "format 2": (fields(STATE, format=2, sealed=True), "`format` must be 1; got `2`"),
    "step -1": (fields(STATE, step=-1), "`step` must be greater than or equal to 0; got `-1`"),
    "step 3": (fields(STATE, step=3), CHANGED),
    "step 600": (fields(STATE, step=600), CHANGED),
    "step 600, sealed": (fields(STATE, step=600, sealed=True), "belongs to step 600"),
    "position 1e9": (fields(STATE, position=10**9), CHANGED),
    "position 1e9, sealed": (
        fields(STATE, position=10**9, sealed=True),
        "must have the 1,000,000,000 bytes",
    ),
    "position 9, sealed": (fields(STATE, position=9, sealed=True), "was changed in its first 9 bytes"),
    "ended": (fields(STATE, ended="finished"), CHANGED),
    "skipped": (fields(STATE, skipped=2), CHANGED),
    "no callbacks, sealed": (fields(STATE, callbacks=[], sealed=True), "it has 0 callbacks, but the run has 1"),
    "callbacks without memory, sealed": (
        fields(STATE, callbacks=[{}], sealed=True),
        "the callback cannot continue from the checkpoint: KeyError: 'losses'",
    ),
}
FILES = {
    **unreadable(MODEL, RESUME),
    **unreadable(OPTIMIZER, RESUME),
    **unreadable(METRICS, RESUME),
    **{f"{name} with a byte more": (edit(name, lambda content: content + b"x"), RESUME) for name in (MODEL, OPTIMIZER)},
    **{f"{name} of step 4": (take(name, OLDER), TENSORS) for name in (MODEL, OPTIMIZER)},
    **{f"{name} of another run": (take(name, f"../other/{NEWEST}"), TENSORS) for name in (MODEL, OPTIMIZER)},
    **{
        f"{name} flipped at {offset}": (flip(name, offset), RESUME)
        for name in (MODEL, OPTIMIZER)
        for offset in OFFSETS
    },
    "weights as float16": (tensors(MODEL, cast(torch.float16)), "float16 [16] in the file, float32 [16] in the model"),
    "weights as int64": (tensors(MODEL, cast(torch.int64)), "int64 [16] in the file, float32 [16] in the model"),
    "weights without one": (tensors(MODEL, dict.popitem), "missing in the file, float32"),
    "weights with one more": (tensors(MODEL, lambda loaded: loaded.update(w=torch.ones(2))), "w: float32 [2]"),
    "state of the optimizer as float16": (tensors(OPTIMIZER, cast(torch.float16)), TENSORS),
    "state of the optimizer without a tensor": (tensors(OPTIMIZER, dict.popitem), TENSORS),
    "state of the optimizer of a parameter more": (
        tensors(OPTIMIZER, lambda loaded: loaded.update({"w/step": torch.ones(2)})),
        "the model has no parameter for the tensor `w/step`",
    ),
    "metrics of another run": (take(METRICS, "../other"), RESUME),
    "metrics flipped": (flip(METRICS, 99), "was changed in its first"),
    "metrics without a byte": (edit(METRICS, lambda content: content[:-1]), "bytes of its checkpoint"),
    "metrics with half a line more": (edit(METRICS, lambda content: content + b'{"step": 6, "lo'), CONTINUES),
}  # fmt: skip
LATESTS = {
    "latest missing": (lambda folder: (folder / LATEST).unlink(), CONTINUES),
    "latest empty": (write(LATEST, b""), "`FOLDER/latest` must name a checkpoint; got ``"),
    "latest binary": (write(LATEST, bytes(range(256))), "`FOLDER/latest` must name a checkpoint"),
    "latest a folder": (replace(LATEST, os.mkdir), "cannot read `FOLDER/latest`: it is a folder"),
    "latest a pipe": (replace(LATEST, os.mkfifo), "cannot read `FOLDER/latest`: it is a folder, a pipe"),
    "latest a dangling link": (replace(LATEST, lambda path: path.symlink_to("nowhere")), "cannot read `FOLDER/latest`"),
    "latest in another folder": (write(LATEST, b"../other/step-5"), "must name a checkpoint; got `../other/step-5`"),
    "latest that does not exist": (write(LATEST, b"step-99"), "must name a checkpoint; got `step-99`"),
    "latest is the older one": (write(LATEST, b"step-4"), CONTINUES),
    "latest with blanks": (write(LATEST, b" step-5\n\n"), CONTINUES),
    "no checkpoints": (lambda folder: [shutil.rmtree(folder / name) for name in (NEWEST, OLDER)], "must name a"),
}
FACT = "cannot read `FOLDER/run.json`: "
RUNS = {
    **unreadable(FACTS, FACT),
    **invalid_fields(FACTS, ["digest", "meaning", "bits", "environment", "sessions"], [3, [3]], FACT),
    "run.json is missing": (lambda folder: (folder / FACTS).unlink(), "`FOLDER` must hold only the files of a run"),
    "run.json a list": (write(FACTS, b"[]"), "its JSON is not an object"),
    "run.json with a field of a later version": (fields(FACTS, more=1), "`more` is unknown to this version of tfkit"),
    "run.json without ended": (fields(FACTS, ended=...), CONTINUES),
    "run.json with ended as a number": (fields(FACTS, ended=3), "`ended` must be a valid string; got `3`"),
    "run.json with ended, and no session": (fields(FACTS, ended="finished", sessions=[]), "has no `step`"),
    "run.json with a session of nothing": (fields(FACTS, sessions=[{}]), "`sessions.0.command` is missing"),
    "run.json of another run": (take(FACTS, "../other"), "`FOLDER` has a different run"),
    "run.json with another meaning": (fields(FACTS, meaning={}), "seed: not there -> 3"),
}
OUTSIDE = "outside"
"""A folder next to the run folders, to which links lead."""


def linked(name: str, target: str) -> Tamper:
    """Replace a file or a folder by a link."""

    def tamper(folder: Path) -> None:
        path = folder / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
        path.symlink_to(target)

    return tamper


PIPE = "must be a file or a folder that tfkit wrote; got a device or a pipe"
LINK, NOT_A_CHECKPOINT = "must be a file or a folder that tfkit wrote; got a link to", "must be a checkpoint"
LINKS = {
    **{f"{name} linked outside": (linked(name, f"../{OUTSIDE}/file"), LINK)
        for name in ("latest", "run.yaml", "run.json", METRICS, "report.html", "lock", "wandb.id", "mlflow.id")},
    **{f"{name} linked outside": (linked(name, f"../{OUTSIDE}"), LINK) for name in ("step-4", "step-6", "ema", "tb")},
    "report.html linked to a new file outside": (linked("report.html", f"../{OUTSIDE}/new"), LINK),
    "lock linked to a new file outside": (linked("lock", f"../{OUTSIDE}/new"), LINK),
    "ema linked to itself": (linked("ema", "ema"), "cannot write `FOLDER/ema`: Too many levels of symbolic links"),
    "latest linked inside": (linked("latest", METRICS), "must name a checkpoint"),
    "step-6 linked inside": (linked("step-6", OLDER), LINK),
    "a link that tfkit never writes to": (linked("best", OLDER), CONTINUES),
    "step-6 of something else": (lambda folder: shutil.copytree(OUTSIDE, folder / "step-6"), NOT_A_CHECKPOINT),
    "a pipe": (lambda folder: os.mkfifo(folder / "wandb.id"), PIPE),
    # A run checks all names in its folder before it reads the first file.
    **{name: ({**FILES, **LATESTS, **RUNS}[name][0], PIPE)
        for name in (f"{METRICS} is a pipe", "latest a pipe", f"{FACTS} is a pipe")},
}  # fmt: skip
CASES: dict[str, tuple[Tamper, str]] = {**STATES, **FILES, **LATESTS, **RUNS, **LINKS}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run, and its folders: `whole` has all steps, `part` five of them, and `other` is the folder of another run."""
    home = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(home)
        run, other = (small_run(home, *SETS, f"seed={seed}") for seed in (3, 4))
        train_run(run, Path("whole"), PLUGINS, command="test")
        train_run(run, Path("part"), PLUGINS, command="test", until=5)
        train_run(other, Path("other"), PLUGINS, command="test", until=5)
        Path(OUTSIDE).mkdir()
        for name in ("file", "spec.yaml"):  # `spec.yaml`: as in a model, which `ema` replaces
            Path(OUTSIDE, name).write_text("outside\n", encoding="utf-8")
        yield run


def tampered(name: str, tamper: Tamper) -> Path:
    """Copy `part` to a new folder, and tamper with the copy."""
    folder = Path(name)
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree("part", folder)
    tamper(folder)
    return folder


def snapshot(folder: Path) -> dict[str, object]:
    """Everything in a folder but `lock` and the sessions of `run.json`, to the last byte."""
    paths = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.name != "lock"}
    contents: dict[str, object] = {name: path.read_bytes() for name, path in paths.items() if path.is_file()}
    contents |= {name: path.lstat().st_mode for name, path in paths.items() if name not in contents}
    facts = contents.get(FACTS)
    with suppress(ValueError, TypeError):
        contents[FACTS] = {**json.loads(facts), "sessions": None} if isinstance(facts, bytes) else facts
    return contents


def end_of(folder: str) -> dict[str, object]:
    """The contents of a complete run, without its checkpoint before the last."""
    return {name: content for name, content in contents(folder).items() if not name.startswith((NEWEST, OLDER))}


@pytest.mark.parametrize(
    "case", chosen(CASES, {*spread(list(CASES), 39), "step-6 of something else", "state of another run"})
)
def test_a_tampered_folder(case: str, run: Run) -> None:
    tamper, expected = CASES[case]
    folder = tampered("tampered", tamper)
    before = snapshot(folder)
    if expected == CONTINUES:
        trained = train_run(run, folder, PLUGINS, command="test")
        assert trained.steps_made <= 2, "the run began again"
        assert end_of("tampered") == end_of("whole")
        return
    with pytest.raises(SpecError) as error:
        train_run(run, folder, PLUGINS, command="test")
    (diagnostic,) = error.value.diagnostics
    assert expected.replace("FOLDER", "tampered") in "\n".join((diagnostic.message, *diagnostic.notes))
    assert snapshot(folder) == before
    assert {path.name: path.read_text(encoding="utf-8") for path in Path(OUTSIDE).iterdir()} == {
        "file": "outside\n",
        "spec.yaml": "outside\n",
    }


def test_a_run_writes_through_no_link(run: Run) -> None:
    """Links that appear while a run trains are checked at each write."""
    folder = tampered("late", lambda _: None)
    record, model = RunFolder(folder, run, {}, {}), build(run.graph)
    record.restored(model)
    record.resume()
    for name, write in {"step-6": lambda: record.save(Checkpoint(6, model, {}, ())),
                        "ema": lambda: record.save_model("ema", model),
                        "run.json": lambda: record.end("finished", 1.0, 2, 5, finished=True)}.items():  # fmt: skip
        linked(name, f"../{OUTSIDE}")(folder)
        with pytest.raises(SpecError, match=re.escape(f"`late/{name}` must be a file or a folder that tfkit wrote")):
            write()
    record.close()
    assert sorted(path.name for path in Path(OUTSIDE).iterdir()) == ["file", "spec.yaml"]


def test_a_backup_of_hard_links_keeps_the_metrics(run: Run) -> None:
    folder = tampered("linked", write(LATEST, OLDER.encode()))
    shutil.rmtree("backup", ignore_errors=True)
    shutil.copytree(folder, "backup", copy_function=os.link)
    before = snapshot(Path("backup"))
    train_run(run, folder, PLUGINS, command="test")
    assert end_of("linked") == end_of("whole")
    assert snapshot(Path("backup")) == before


@pytest.mark.parametrize(
    "case", ["latest missing", f"{MODEL} of step 4", "metrics flipped", "latest in another folder"]
)
def test_other_processes_read_the_folder_in_the_same_way(case: str, run: Run) -> None:
    tamper, expected = CASES[case]
    folder = tampered("followed", tamper)
    follower, model = Follower(folder, run), build(run.graph, device="meta")
    if expected == CONTINUES:
        restored = follower.restored(model)
        assert restored is not None
        assert restored.step == 5
        return
    with pytest.raises(SpecError, match=re.escape(expected.replace("FOLDER", "followed"))):
        follower.restored(model)


@pytest.mark.parametrize("case", LATESTS)
def test_commands_read_the_checkpoint_that_a_run_continues_from(case: str, run: Run) -> None:
    tamper, expected = LATESTS[case]
    folder = tampered("read", tamper)
    if expected == CONTINUES:
        weights = load_file(folder / (OLDER if "older" in case else NEWEST) / WEIGHTS)
        assert all(torch.equal(tensor, weights[name]) for name, tensor in tfkit.build(folder).state_dict().items())
        return
    with pytest.raises(SpecError, match=re.escape(expected.replace("FOLDER", "read"))):
        tfkit.build(folder)


CHANGED_WEIGHTS: dict[str, Tamper] = {
    "flipped": flip(MODEL, -4),
    "of another run": take(MODEL, f"../other/{NEWEST}"),
    "of another step": take(MODEL, OLDER),
    "without a digest": lambda folder: (folder / STATE).unlink(),
    "with a digest that cannot be read": write(STATE, b"{"),
    "with another digest": fields(STATE, model="0" * 64),
}


@pytest.mark.parametrize("case", CHANGED_WEIGHTS)
def test_changed_weights_of_a_run_are_not_used_in_silence(
    case: str, run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tampered("changed", CHANGED_WEIGHTS[case])
    message = f"the tensors in `changed/{MODEL}` are not the tensors that the run wrote"
    for path in (folder, folder / NEWEST, folder / MODEL):
        with pytest.raises(SpecError, match=re.escape(message)):
            evaluate_run(run, path, PLUGINS, (), (), allow_change=False)
        with pytest.warns(ChangedWeightsWarning, match=re.escape(message)):
            tfkit.build(run.graph, weights=path)
    save = ["save", "changed", "--layout", "tfkit", "--no-plugins", "-o", "saved"]
    assert main(save) == 1
    assert f"error: {message}" in capsys.readouterr().err
    assert not Path("saved").exists()
    with pytest.warns(ChangedWeightsWarning):
        assert evaluate_run(run, folder, PLUGINS, (), (), allow_change=True)
    assert main([*save, "--allow-change", "--force"]) == 0
    assert f"warning: {message}" in capsys.readouterr().err
    shutil.rmtree("saved")


def test_two_processes_without_locks_are_noticed(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_locks(number: int) -> bool:
        raise OSError(errno.ENOLCK, "no locks available")

    monkeypatch.setattr(record_module, "try_lock", no_locks)
    model = build(run.graph)
    for earlier, later in (("first", "second"), ("second", "first")):
        folder = tampered("shared", lambda _: None)
        records = {name: RunFolder(folder, run, {}, {}) for name in ("first", "second")}
        for record in records.values():
            record.restored(model)
            record.resume()
        records["first"].log(6, {"loss": 2.0})
        records["second"].log(6, {"loss": 3.5})
        records[earlier].saving()  # flushes its lines
        with pytest.raises(SpecError, match=r"another process writes to `shared/metrics\.jsonl`"):
            records[later].save(Checkpoint(6, model, {}, ()))
        assert not (folder / "step-6").exists()
        for record in records.values():
            record.close()
    capsys.readouterr()
    train_run(run, tampered("shared", lambda _: None), PLUGINS, command="test")
    assert capsys.readouterr().err == (
        "warning: the file system of shared has no locks: start only one process that trains there\n"
    )


def test_the_folder_ema_has_a_digest(run: Run) -> None:
    folder = tampered("averaged", lambda _: None)
    record, model = RunFolder(folder, run, {}, {}), build(run.graph)
    record.save_model("ema", model)
    tfkit.build(folder / "ema")
    flip(f"ema/{WEIGHTS}", -4)(folder)
    with pytest.warns(ChangedWeightsWarning, match="averaged/ema"):
        tfkit.build(folder / "ema")


def test_weights_are_read_once_for_their_digest(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that was written a moment ago is read again: a second change could leave its times equal."""
    folder, reads = tampered("cached", lambda _: None), list[Path]()
    data = weight_files._tensor_bytes
    monkeypatch.setattr(weight_files, "_tensor_bytes", lambda path, entry: reads.append(path) or data(path, entry))
    for age, passes in ((0, 2), (10, 1)):
        os.utime(folder / MODEL, ns=(0, time.time_ns() - age * 10**9))
        reads.clear()
        first, second = (content_of(folder / MODEL) for _ in range(2))
        assert first == second == json.loads((folder / STATE).read_text(encoding="utf-8"))["model"]
        assert len(reads) == passes * len(load_file(folder / MODEL))


@contextmanager
def one_of_three(run: Run, rank: int) -> Iterator[fx.GraphModule]:
    """Yield the model of one of three processes, which gets no answer from the others."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=3)
    try:
        yield Together().build(run, torch.device("cpu"))
    finally:
        dist.destroy_process_group()


def test_each_process_checks_a_share_of_a_checkpoint(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Together they check each tensor once, and one of them names a tensor that was changed."""
    monkeypatch.setattr(Together, "check_equal", lambda *_: None)
    folder, damaged = tampered("shared", lambda _: None), tampered("damaged", flip(MODEL, -4))
    read, shares, errors = list[Any](), list[list[Any]](), list[Diagnostic]()
    data = weight_files._tensor_bytes
    monkeypatch.setattr(
        weight_files, "_tensor_bytes", lambda path, entry: read.append((path, entry)) or data(path, entry)
    )
    for rank in range(3):
        with one_of_three(run, rank) as model:
            read.clear()
            assert Follower(folder, run).restored(model) is not None
            shares.append([*read])
            try:
                Follower(damaged, run).restored(model)
            except SpecError as error:
                errors += error.diagnostics
    entries = [entry for share in shares for entry in share]
    assert len(entries) == len(set(entries)) == len(load_file(folder / MODEL)) + len(load_file(folder / OPTIMIZER))
    sizes = [sum(entry.end - entry.start for _, entry in share) for share in shares]
    assert max(sizes) < 1.1 * sum(sizes) / 3
    name = max(read_header(folder / MODEL).tensors.items(), key=lambda item: item[1].end)[0]
    (diagnostic,) = errors
    assert diagnostic.message == f"{RESUME}the tensors in `damaged/{MODEL}` {TENSORS}".replace("FOLDER", "damaged")
    assert re.fullmatch(rf"changed: `{re.escape(name)}`, read by process [012] of 3", diagnostic.notes[0])


def without_digests(folder: Path) -> None:
    """Remove the digests of tensors, as in the checkpoints of earlier versions."""
    fields(STATE, sealed=True, digests=...)(folder)


def test_a_checkpoint_without_digests_of_tensors_is_checked_completely(run: Run) -> None:
    folder = tampered("earlier", without_digests)
    train_run(run, folder, PLUGINS, command="test")
    assert end_of("earlier") == end_of("whole")
    folder = tampered("earlier", lambda path: (without_digests(path), flip(OPTIMIZER, -4)(path)))
    with pytest.raises(SpecError, match=f"`earlier/{OPTIMIZER}` {TENSORS}"):
        train_run(run, folder, PLUGINS, command="test")


def test_a_later_checkpoint_stays_until_the_next_one_is_written(run: Run) -> None:
    folder = tampered("resumed", write(LATEST, OLDER.encode()))
    record, model = RunFolder(folder, run, {}, {}), build(run.graph, device="meta")
    restored = record.restored(model)
    assert restored is not None
    assert restored.step == 4
    record.resume()
    record.close()
    assert (folder / NEWEST / WEIGHTS).exists()
    trained = train_run(run, folder, PLUGINS, command="test")
    assert trained.steps_made == 2
    assert not (folder / NEWEST).exists()
    assert end_of("resumed") == end_of("whole")


def test_a_checkpoint_that_replaces_a_later_one_stays(run: Run) -> None:
    folder = tampered("replaced", write(LATEST, OLDER.encode()))
    record, model = RunFolder(folder, run, {}, {}), build(run.graph)
    record.restored(model)
    record.resume()
    record.save(Checkpoint(int(NEWEST.rpartition("-")[2]), model, {}, ()))
    record.close()
    assert (folder / NEWEST / WEIGHTS).exists()
    assert (folder / LATEST).read_text(encoding="utf-8").strip() == NEWEST


def test_the_remains_of_a_killed_removal_are_still_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {"optimizer.safetensors", "model.safetensors", "state.json", "latest"}
    remains = []
    for last in range(len(names) + 1):
        folder = tmp_path / f"step-{last}"
        folder.mkdir()
        for name in names:
            (folder / name).touch()
        with monkeypatch.context() as patch:
            calls = iter([*[Path.unlink] * last, killed])
            patch.setattr(Path, "unlink", lambda path, calls=calls: next(calls)(path))
            patch.setattr(Path, "rmdir", killed)
            with pytest.raises(KeyboardInterrupt):
                record_module._remove_checkpoint(folder)
        remains.append(len(list(folder.iterdir())))
        assert record_module._is_checkpoint(folder)
        record_module._remove_checkpoint(folder)
        assert not folder.exists()
    assert remains == [4, 3, 2, 1, 0]


def killed(path: Path) -> None:
    raise KeyboardInterrupt

"""Killed writes leave complete old or new contents, and the next write removes the leftover files."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tfkit.cli import main
from tfkit.tools.common import atomic_files
from tfkit.tools.common.atomic_files import extras_of, fresh_file, fresh_folder, names_in, write_file
from tfkit.tools.export.formats import Safetensors

from ...sampling import some
from ..conftest import DECODER
from .moments import State, moments, restored, state_of

Write = Callable[[Path, str], None]


def a_file(path: Path, text: str) -> None:
    write_file(path, text)


def a_folder(path: Path, text: str) -> None:
    with fresh_folder(path) as new:
        (new / "a").write_text(text)
        (new / "b").mkdir()
        (new / "b/c").write_text(text)


def a_file_with_parts(path: Path, text: str) -> None:
    with fresh_file(path) as new:
        extras_of(new).mkdir()
        (extras_of(new) / "a").write_text(text)
        (extras_of(new) / "b").write_text(text)
        new.write_text(f"{text} {extras_of(new).name}")


WRITERS: dict[str, Write] = {"a file": a_file, "a folder": a_folder, "a file with parts": a_file_with_parts}


def contents_of(path: Path) -> object:
    """What somebody finds who opens a target."""
    if path.is_dir():
        return state_of(path)
    words = path.read_text().split()
    parts = [state_of(path.with_name(name)) for name in words[1:]]
    return words[0], parts


def visible(state: State) -> set[str]:
    return {name for name in state if not name.startswith(".")}


def left(folder: Path) -> list[str]:
    """Hidden names, and parts that no file names."""
    names = [path.name for path in folder.iterdir()]
    named = [
        name for file in folder.iterdir() if file.is_file() for name in names if name.encode() in file.read_bytes()
    ]
    return [name for name in names if name.startswith(".") or (".parts-" in name and name not in named)]


@pytest.mark.parametrize("before", ["nothing", "an old one"])
@pytest.mark.parametrize("name", WRITERS)
def test_killed_at_every_moment(name: str, before: str, tmp_path: Path) -> None:
    write, home = WRITERS[name], tmp_path / "home"
    home.mkdir()
    target, expected = home / "target", []
    if before == "an old one":
        write(target, "old")
        expected = [contents_of(target)]
    with moments(home) as states:
        write(target, "new")
    expected.append(contents_of(target))
    assert len(states) > 8
    for number, state in enumerate(states):
        again = restored(state, tmp_path / str(number))
        if before == "nothing" and not (again / "target").exists():
            assert not visible(state) - {path for path in state if ".parts-" in path}
        else:
            assert contents_of(again / "target") in expected
        write(again / "target", "third")
        assert left(again) == []
        assert len([path for path in again.iterdir() if ".parts-" not in path.name]) == 1


def test_without_an_exchange_the_next_run_recovers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a file system cannot exchange two folders, one of them is gone for a moment, and never lost."""
    monkeypatch.setattr(atomic_files, "exchange_paths", lambda first, other: False)
    home = tmp_path / "home"
    a_folder(home / "target", "old")
    expected = [contents_of(home / "target")]
    with moments(home) as states:
        a_folder(home / "target", "new")
    expected.append(contents_of(home / "target"))
    gone = [state for state in states if "target" not in state]
    assert gone
    for number, state in enumerate(states):
        again = restored(state, tmp_path / str(number))
        assert names_in(again / "target") == ["a", "b"]
        assert contents_of(again / "target") in expected
        assert left(again) == []


def test_leftover_files_are_not_moved_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/thesis").write_text("text")
    staging = tmp_path / "home/.target.0123abcd.new"
    staging.mkdir(parents=True)
    (staging / "lock").touch()
    for name in ("old", "new"):
        (staging / name).symlink_to("../../outside")
    a_file(tmp_path / "home/target", "text")
    assert state_of(tmp_path / "outside") == {"thesis": b"text"}
    assert (tmp_path / "home/target").read_text() == "text"


def test_folders_are_exchanged_in_one_step(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    if not atomic_files.exchange_paths(tmp_path / "one", tmp_path / "other"):
        pytest.skip("this file system cannot")
    assert state_of(tmp_path) == {"one": None, "one/other": b"", "other": None, "other/one": b""}
    with pytest.raises(FileNotFoundError):
        atomic_files.exchange_paths(tmp_path / "one", tmp_path / "nowhere")


@pytest.mark.parametrize("name", WRITERS)
def test_all_is_on_the_disk_before_it_has_its_name(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[tuple[str, bool]] = []
    target, fsync = tmp_path / "target", os.fsync

    def watched(number: int) -> None:
        flushed.append((Path(os.readlink(f"/proc/self/fd/{number}")).name, target.exists()))
        fsync(number)

    monkeypatch.setattr(os, "fsync", watched)
    WRITERS[name](target, "text")
    expected = {"a file": {"target"}, "a folder": {"target", "a", "b", "c"}, "a file with parts": {"target", "a", "b"}}
    assert expected[name] <= {file for file, _ in flushed}
    assert not any(exists for _, exists in flushed)


# ---- several processes ----


def test_who_lives_is_left_alone(tmp_path: Path) -> None:
    target = tmp_path / "target"
    with fresh_file(target) as new:
        extras_of(new).mkdir()
        (extras_of(new) / "a").write_text("first")
        new.write_text(f"first {extras_of(new).name}")
        a_file_with_parts(target, "second")
        assert contents_of(target)[0] == "second"  # type: ignore[index]
        assert new.exists()
    assert contents_of(target)[0] == "first"  # type: ignore[index]
    assert left(tmp_path) == []


def test_parts_that_are_about_to_be_named_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target, put = tmp_path / "target", atomic_files.move_to_target

    def meanwhile(folder: Path, draft: Path) -> None:
        monkeypatch.setattr(atomic_files, "move_to_target", put)
        a_file_with_parts(target, "second")
        put(folder, draft)

    monkeypatch.setattr(atomic_files, "move_to_target", meanwhile)
    a_file_with_parts(target, "first")
    assert contents_of(target) == ("first", [{"a": b"first", "b": b"first"}])
    assert left(tmp_path) == []


@pytest.mark.parametrize("name", some(WRITERS, 1))
def test_three_at_once(name: str, tmp_path: Path) -> None:
    target, children = tmp_path / "target", []
    for text in ("first", "second", "third"):
        if (child := os.fork()) == 0:
            status = 1
            try:
                for _ in range(12):
                    WRITERS[name](target, text)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    assert [os.waitpid(child, 0)[1] for child in children] == [0, 0, 0]
    alone = tmp_path / "alone"
    alone.mkdir()
    result = []
    for text in ("first", "second", "third"):
        WRITERS[name](alone / "target", text)
        result.append(contents_of(alone / "target"))
    assert contents_of(target) in result
    WRITERS[name](target, "last")  # takes away what each of the last two left to the other
    assert left(tmp_path) == []


def test_a_killed_process_lets_go(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        with fresh_file(tmp_path / "target") as new:
            new.write_text("half")
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    assert len(left(tmp_path)) == 1
    write_file(tmp_path / "other", "of no concern")
    assert len(left(tmp_path)) == 1
    write_file(tmp_path / "target", "new")
    assert left(tmp_path) == []


def test_cleanup_keeps_user_folders_with_similar_names(tmp_path: Path) -> None:
    for name in (".target.0123abcd.new", ".target.mine.new", "target.parts-mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.tex").write_text("years of work")
    before = state_of(tmp_path)
    write_file(tmp_path / "target", "new")
    assert state_of(tmp_path) == before | {"target": b"new"}


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fcntl = pytest.importorskip("fcntl")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    a_file(tmp_path / "target", "old")
    a_file(tmp_path / "target", "new")
    assert state_of(tmp_path) == {"target": b"new"}


@pytest.mark.parametrize("name", ["a" * 255, "é" * 127, "字" * 85])
def test_the_longest_names(name: str, tmp_path: Path) -> None:
    write_file(tmp_path / name, "text")
    a_folder(tmp_path / name[:-1], "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, name[:-1]])


# ---- signals ----


@pytest.fixture
def _usual_signals() -> Iterator[None]:
    """As a terminal has them: nohup and `&` of a shell hand down signals that are ignored."""
    usual = {signal.SIGTERM: signal.SIG_DFL, signal.SIGHUP: signal.SIG_DFL, signal.SIGINT: signal.default_int_handler}
    before = {number: signal.signal(number, handler) for number, handler in usual.items()}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("_usual_signals")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_takes_away_what_was_begun(
    number: signal.Signals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def half(self: object, model: object, inputs: object, path: Path) -> None:
        path.write_bytes(b"half")
        os.kill(os.getpid(), number)

    monkeypatch.setattr(Safetensors, "write", half)
    (tmp_path / "spec.yaml").write_text(DECODER)
    arguments = ["export", str(tmp_path / "spec.yaml"), "-o", str(tmp_path / "a.safetensors"), "--no-plugins"]
    assert main(arguments) == 128 + number
    text = capsys.readouterr().err
    assert text == ("interrupted\n" if number == signal.SIGINT else f"ended by {number.name}\n")
    assert [path.name for path in tmp_path.iterdir()] == ["spec.yaml"]
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

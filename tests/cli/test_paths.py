"""Missing paths, and unusual valid paths, in every argument and option that takes a path."""

from __future__ import annotations

import builtins
import errno
import io
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest

import tfkit
from tests.run.training.runs import RUN, write_run
from tfkit.checkpoint.files import TensorFiles
from tfkit.cli import main
from tfkit.decoding.text import load_tokenizer
from tfkit.tools.common.atomic_files import names_in, write_file
from tfkit.tools.import_.importing import import_config

from ..sampling import chosen, slow, some
from ..tools.conftest import DECODER

BAD = {"loop": "loop", "long": "a" * 300, "through": "file/below", "locked": "locked/below"}
"""A loop of links, a name that no file system takes, a folder that is a file, and a folder without permission."""
UNREADABLE = {**BAD, "closed": "locked"}
ENDLESS = ("pipe", "/dev/zero")
"""A pipe that nothing writes to, and a device that never ends."""
ODD = ("line\nbreak", "\x1b[2J", os.fsdecode(b"\xff"))
"""Names that a file may have, and that no terminal and no encoding should be given as they are."""

SWEEP = (
    "tfkit: 1\nbase: run.yaml\nvariants: {a: {}, b: {clip: 2}}\nseeds: [0, 1, 2, 3, 4, 5]\ncompare: {on: val.loss}\n"
)
EVALUATION = "eval: {every: 4, splits: {val: all}}\n"
PUBLISHED = Path(__file__).parents[1] / "published"
FILES = {
    "draw": (["draw", "spec.yaml", "-o"], ".svg"),
    "eject": (["eject", "spec.yaml", "-o"], ".py"),
    "export": (["export", "spec.yaml", "-o"], ".safetensors"),
    "import": (["import", "config.json", "-o"], ".yaml"),
    "schema": (["schema", "-o"], ".json"),
    "solve": (["solve", "spec.yaml", "--params", "10000", "-o"], ".yaml"),
    "tokenizer": (["tokenizer", "text", "--vocab-size", "260", "-o"], ".json"),
    "tokens": (["tokens", "text", "--tokenizer", "text", "-o"], ".npy"),
}
FOLDERS = {
    "build": ["build", "spec.yaml", "-o"],
    "new": ["new", "plugin", "shift", "-o"],
    "profile": ["profile", "spec.yaml", "--mode", "prefill", "--steps", "2", "--warmup", "0", "--length", "4", "-o"],
    "save": ["save", "spec.yaml", "--weights", "model.safetensors", "--layout", "tfkit", "-o"],
    "train": ["train", "run.yaml", "-o"],
    "sweep": ["sweep", "sweep.yaml", "-o"],
}
RUNS = {"train": ["-o", "out"], "eval": [], "sample": ["-o", "out.npy"]}
ON_A_SPEC = ("build", "params", "generate", "draw", "cost", "export", "eject", "show", "profile", "validate")
INPUTS = {
    **{f"{name} SPEC": [name, "{}.yaml", *(["-o", "out.svg"] if name == "draw" else [])] for name in ON_A_SPEC},
    "export SPEC": ["export", "{}.yaml", "-o", "out.ts"],
    "generate SPEC": ["generate", "{}.yaml", "--tokens", "1"],
    "solve SPEC": ["solve", "{}.yaml", "--params", "1M"],
    "diff SPEC": ["diff", "spec.yaml", "{}.yaml"],
    "compare SPEC": ["compare", "spec.yaml", "{}.yaml"],
    "compare DIR": ["compare", "spec.yaml", "{}"],
    "import CONFIG": ["import", "{}"],
    "import FAMILY": ["import", "config.json", "--family", "{}.yaml"],
    "tensors PATH": ["tensors", "{}"],
    "check SPEC": ["check", "{}.yaml"],
    "check DIR": ["check", "{}"],
    "diff DIR": ["diff", "spec.yaml", "{}"],
    "show DIR": ["show", "{}"],
    "extends": ["show", "spec.yaml", "--set", "extends={}.yaml"],
    **{f"{command} RUN": [command, "{}.yaml", *words] for command, words in RUNS.items()},
    **{f"{command} RUN DIR": [command, "{}", *words] for command, words in RUNS.items()},
    "train DATA": ["train", "run.yaml", "--plan", "--set", "data.files={}"],
    "train DATA tokens": ["train", "run.yaml", "--plan", "--set", "data={{kind: tokens, files: {}.npy}}"],
    "train MODEL": ["train", "run.yaml", "--plan", "--set", "model={}.yaml"],
    "eval WEIGHTS": ["eval", "run.yaml", "--weights", "{}"],
    "sweep SWEEP": ["sweep", "{}.yaml", "--plan"],
    "sweep DIR": ["sweep", "{}", "--plan"],
    "runs DIR": ["runs", "{}"],
    "runs BASELINE": ["runs", "spec.yaml", "--baseline", "{}"],
    "tokenizer TEXT": ["tokenizer", "{}", "--vocab-size", "260", "-o", "tokenizer.json"],
    "tokens TOKENIZER": ["tokens", "text", "--tokenizer", "{}", "-o", "out.npy"],
    "save WEIGHTS": ["save", "spec.yaml", "--weights", "{}", "--layout", "tfkit", "-o", "out"],
    "build WEIGHTS": ["build", "spec.yaml", "--weights", "{}"],
    "export WEIGHTS": ["export", "spec.yaml", "--weights", "{}", "-o", "out.ts"],
    "profile WEIGHTS": ["profile", "spec.yaml", "--weights", "{}"],
    "attention SPEC": ["attention", "{}.yaml", "--tokens", "1", "-o", "out.svg"],
    "attention TOKENIZER": ["attention", "spec.yaml", "--tokenizer", "{}", "--prompt", "a", "-o", "out.svg"],
    "compare WEIGHTS": ["compare", "spec.yaml", "spec.yaml", "--weights", "{}"],
    "generate WEIGHTS": ["generate", "spec.yaml", "--weights", "{}", "--prompt", "a"],
    "generate TOKENIZER": ["generate", "spec.yaml", "--tokenizer", "{}", "--prompt", "a"],
    "generate TOKENIZER.json": ["generate", "spec.yaml", "--tokenizer", "{}.json", "--prompt", "a"],
    "generate PROMPT": ["generate", "spec.yaml", "--tokenizer", "text", "--prompt-file", "{}"],
    "PLUGIN": ["show", "spec.yaml", "--plugin-dir", "{}"],
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a spec, a config, a loop of links and a file; nothing hidden is left in it."""
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(DECODER)
    write_run(tmp_path, RUN + EVALUATION).rename("run.yaml")
    Path("sweep.yaml").write_text(SWEEP)
    Path("text").write_text("abc")
    Path("file").write_text("")
    Path("config.json").write_text((PUBLISHED / "distilgpt2.json").read_text())
    for end in ("", ".svg", ".py", ".safetensors", ".yaml", ".json", ".ts", ".npy"):
        Path(f"loop{end}").symlink_to(f"loop{end}")
        os.mkfifo(f"pipe{end}")
    Path("locked").mkdir()
    without_permission(monkeypatch)
    yield tmp_path
    monkeypatch.undo()
    assert not list(tmp_path.rglob(".*"))


def without_permission(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the system refuse everything below `locked`: a test may run as root, who is refused nothing."""

    def refusing(call: Callable[..., Any]) -> Callable[..., Any]:
        def refuse(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            inside = os.sep if call in (os_listdir, os_scandir) else ""
            if not isinstance(path, int) and f"locked{os.sep}" in os.fsdecode(path) + inside:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
            return call(path, *arguments, **options)

        return refuse

    os_listdir, os_scandir = os.listdir, os.scandir
    names = ("stat", "lstat", "open", "listdir", "scandir", "mkdir", "readlink", "chmod")
    for owner, name in [*((os, name) for name in names), (io, "open"), (builtins, "open")]:
        monkeypatch.setattr(owner, name, refusing(getattr(owner, name)))


@contextmanager
def soon() -> Iterator[None]:
    """Fail a block that waits: for a pipe's other end, or for the end of a device."""

    def ring(*_: object) -> None:
        pytest.fail("the command hangs")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(20)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command says that must fail."""
    before = {*os.listdir()}
    status = main([*arguments, "--no-plugins"])
    out, err = capsys.readouterr()
    assert (status in (1, 2), err.startswith("error: ")) == (True, True), (status, out, err)
    assert "Traceback" not in err
    assert err.count("error: ") == 1
    assert {*os.listdir()} == before
    return err


@pytest.mark.parametrize("bad", some(BAD, 2))
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_written(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, suffix = FILES[name]
    assert "cannot write" in refused(capsys, *words, f"{BAD[bad]}{suffix}")


@pytest.mark.parametrize("bad", some(BAD, 2))
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search("cannot (write|read)", refused(capsys, *FOLDERS[name], BAD[bad]))


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_is_wanted(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, suffix = FILES[name]
    (folder / f"there{suffix}").mkdir()
    assert re.search("is a (folder|directory)", refused(capsys, *words, f"there{suffix}"))
    assert "its folder does not exist" in refused(capsys, *words, f"nowhere/a{suffix}")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_where_a_folder_is_wanted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search("is a file|File exists|Not a directory", refused(capsys, *FOLDERS[name], "file"))


@pytest.mark.parametrize(("name", "bad"), chosen(product(INPUTS, UNREADABLE), {*zip(INPUTS, cycle(UNREADABLE))}))
def test_what_cannot_be_read(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *(word.format(UNREADABLE[bad]) for word in INPUTS[name]))


@pytest.mark.parametrize(("name", "path"), chosen(product(INPUTS, ENDLESS), {*zip(INPUTS, cycle(ENDLESS))}))
def test_what_never_ends(name: str, path: str, capsys: pytest.CaptureFixture[str]) -> None:
    """A pipe without a writer is like an empty file; a text of a terminal or a process may come through a pipe."""
    with soon():
        status = main([*(word.format(path) for word in INPUTS[name]), "--no-plugins"])
    assert (status in (1, 2) or name == "PLUGIN", "Traceback" in capsys.readouterr().err) == (True, False)


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("json", [[], slow(["--json"])])
@pytest.mark.parametrize("name", ["draw", "import", "solve"])
def test_an_odd_name(name: str, json: list[str], odd: str, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    words, suffix = FILES[name]
    assert main([*words, f"{odd}{suffix}", *json, "--no-plugins"]) == 0
    out, _ = capfdbinary.readouterr()
    assert odd.encode(errors="surrogateescape") not in out
    assert Path(f"{odd}{suffix}").stat().st_size


@pytest.mark.parametrize("bad", BAD)
def test_what_cannot_be_extended(bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("mine.yaml").write_text(f"extends: ./{BAD[bad]}.yaml\n")
    refused(capsys, "show", "mine.yaml")


@pytest.mark.parametrize(
    "words", [["tokens", "{}", "--tokenizer", "text", "-o", "out.npy"], ["new", "run", "nanogpt", "-o", "{}"]]
)
def test_a_name_that_is_too_long(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert "File name too long" in refused(capsys, *(word.format(BAD["long"]) for word in words))


def test_a_zero_byte(folder: Path) -> None:
    """No command line can have one, a caller in Python can."""
    path = folder / "zero\0byte"
    for call in (
        lambda: tfkit.load(path.with_suffix(".yaml")),
        lambda: TensorFiles.open(path),
        lambda: import_config(path),
        lambda: write_file(path, ""),
        lambda: names_in(path),
        lambda: load_tokenizer(path),
    ):
        with pytest.raises(tfkit.SpecError, match=r"cannot (read|write).* null (byte|character)"):
            call()

"""Files of generated code: tracebacks, debuggers and coverage show the lines that run; a build works without them."""

from __future__ import annotations

import bdb
import errno
import inspect
import operator
import os
import subprocess
import sys
import trace
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

import tfkit
from tfkit.nn import Program, code_files, program
from tfkit.nn.code_files import CACHE, run_text

SPEC = """
tfkit: 1
name: filed
d_model: 8
vocab_size: 16
graph:
  embedding: {block: embedding}
  decoder: {block: decoder, n_layers: 2, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head}
"""
TOKENS = torch.arange(6).view(2, 3)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the files, and no class that was written to another folder."""
    monkeypatch.setattr(program, "_CLASSES", {})
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    return tmp_path / "cache" / "code"


def scaled() -> Any:
    written = Program()
    x = written.call("linear", nn.Linear(3, 3), written.input("x"))
    return written.build(written.apply("scaled", operator.mul, x, 1.5), "Scaled")


def file_of(module: nn.Module) -> str:
    return str(type(module).forward.__code__.co_filename)


def line_of(file: str, text: str) -> int:
    (number,) = (n for n, line in enumerate(Path(file).read_text().splitlines(), 1) if text in line)
    return number


def test_a_model_and_its_layers_have_files(cache: Path) -> None:
    model = tfkit.build(tfkit.loads(SPEC))
    assert Path(file_of(model)).read_text() == model.code
    assert Path(file_of(model)).parent == cache
    assert Path(file_of(model)).name.startswith("Filed_")
    module = scaled()
    assert Path(file_of(module)).read_text().endswith(module.code.splitlines()[-1] + "\n")


# ---- what users of the files show ----


def test_python_itself_shows_the_lines_of_an_uncaught_error(cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Python 3.11 reads the lines from files, without the module `linecache`."""
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    model.decoder.layers[1].ffn = nn.Linear(3, 3)
    with pytest.raises(RuntimeError) as raised:
        model(TOKENS)
    sys.__excepthook__(raised.type, raised.value, raised.tb)
    lines = [line.strip() for line in capsys.readouterr().err.splitlines()]
    for module, text in ((model, "decoder = self.decoder("), (model.decoder.layers[1], "return x + self.ffn(")):
        file = file_of(module)
        first = lines.index(f'File "{file}", line {line_of(file, text)}, in forward')
        assert lines[first + 1].startswith(text)


def test_a_debugger_stops_at_a_line(cache: Path) -> None:
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    stops = []

    class Debugger(bdb.Bdb):
        def user_line(self, frame: FrameType) -> None:
            if self.get_breaks(frame.f_code.co_filename, frame.f_lineno):
                stops.append((frame.f_code.co_filename, frame.f_lineno, sorted(frame.f_locals)[-1]))
            self.set_continue()

    debugger = Debugger()
    top, layer = file_of(model), file_of(model.decoder.layers[0])
    for file, text in ((top, "return self.logits("), (layer, "return x + self.ffn(")):
        assert debugger.set_break(file, line_of(file, text)) is None  # the line exists, by the file
    try:
        debugger.runcall(model, TOKENS)
    finally:
        debugger.clear_all_breaks()
    assert stops == [(layer, 4, "x")] * 2 + [(top, line_of(top, "return self.logits("), "tokens_mask")]


def test_coverage_counts_lines(cache: Path, tmp_path: Path) -> None:
    model = tfkit.build(tfkit.loads(SPEC)).eval()
    tracer, debugger = trace.Trace(count=1, trace=0), sys.gettrace()
    try:
        tracer.runfunc(model, TOKENS)
    finally:
        sys.settrace(debugger)
    counts = {(file, line): count for (file, line), count in tracer.results().counts.items() if str(cache) in file}
    layer = file_of(model.decoder.layers[0])
    assert counts[layer, line_of(layer, "return x + self.ffn(")] == 2
    trace.CoverageResults(counts).write_results(show_missing=True, coverdir=str(tmp_path))
    (report,) = tmp_path.glob("*Filed_*.cover")
    assert "    1:     return self.logits(" in report.read_text()


# ---- the files ----


def test_equal_code_is_one_file_that_is_written_once(cache: Path) -> None:
    first = run_text("y = 3\n", "Model", {})
    (path,) = cache.iterdir()
    os.utime(path, ns=(5, 5))
    assert run_text("y = 3\n", "Model", {}) == {**first, "__builtins__": first["__builtins__"]}
    assert path.stat().st_mtime_ns == 5
    run_text("y = 4\n", "Model", {})
    assert len(list(cache.iterdir())) == 2


def test_a_file_that_was_changed_is_written_again(cache: Path) -> None:
    assert run_text("y = 3\n", "Model", {})["y"] == 3
    (path,) = cache.iterdir()
    path.write_text("y = 'changed'\n")
    assert run_text("y = 3\n", "Model", {})["y"] == 3
    assert path.read_text() == "y = 3\n"


def test_code_can_be_read_after_its_file_was_removed_or_changed(cache: Path) -> None:
    module, x = scaled(), torch.randn(2, 3)
    Path(file_of(module)).write_text("changed\n")
    assert inspect.getsource(type(module).forward).strip() == module.code.strip().replace("\n", "\n    ")
    Path(file_of(module)).unlink()
    assert torch.equal(torch.jit.script(module)(x), module(x))


@pytest.mark.parametrize("name", ["../../évasion", "a/b", "", "x" * 999])
def test_names_of_models_that_are_no_file_names(name: str, cache: Path) -> None:
    run_text("y = 3\n", name, {})
    (path,) = cache.iterdir()
    assert path.suffix == ".py"
    assert [item.name for item in cache.parent.parent.iterdir()] == ["cache"]


def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be."""
    (tmp_path / "cache").write_text("")


def full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk that is full when the file gets its name."""

    def fail(source: str, target: str) -> None:
        assert Path(source).exists()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)


def homeless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user whose home folder is unknown."""
    monkeypatch.delenv(CACHE)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


@pytest.mark.parametrize("fault", [blocked, full, homeless])
def test_a_folder_that_cannot_be_written(
    fault: Callable[..., None], cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is built, and `linecache` has its code."""
    monkeypatch.chdir(tmp_path)
    fault(tmp_path, monkeypatch)
    module, x = scaled(), torch.randn(2, 3)
    assert file_of(module).startswith("<tfkit Scaled ")
    assert "return self.linear(x) * " in inspect.getsource(type(module))
    assert torch.equal(torch.jit.script(module)(x), module(x))
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.name != "cache"]


def test_where_the_files_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home, caches = tmp_path / "home", tmp_path / "caches"
    monkeypatch.setenv("HOME", str(home))
    for cache, xdg, folder in (
        (None, None, home / ".cache" / "tfkit"),
        (None, "relative", home / ".cache" / "tfkit"),
        (None, str(caches), caches / "tfkit"),
        ("~/mine", str(caches), home / "mine"),
        ("relative", str(caches), caches / "tfkit"),
        ("", str(caches), caches / "tfkit"),
    ):
        for variable, value in ((CACHE, cache), ("XDG_CACHE_HOME", xdg)):
            monkeypatch.delenv(variable, raising=False) if value is None else monkeypatch.setenv(variable, value)
        assert code_files._folder() == str(folder / "code")


# ---- several processes ----

PROGRAM = """
import os, sys
import tfkit, tfkit.nn, tfkit.components.attention, tfkit.components.head
plugins = tfkit.load_plugins(entry_points=False)
assert not os.path.exists(os.environ["TFKIT_CACHE"]) or sys.argv[2] == "2"
model = tfkit.build(tfkit.loads(sys.argv[1], plugins=plugins))
print(type(model).forward.__code__.co_filename, type(model.decoder.layers[0]).forward.__code__.co_filename)
"""


@pytest.mark.slow
def test_nothing_is_written_at_import_and_processes_share_the_files(cache: Path) -> None:
    """Caches of compiled code, whose keys contain file names, are therefore valid in the next process."""

    def start(number: str) -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", PROGRAM, SPEC, number], stdout=subprocess.PIPE, text=True)

    first, _ = start("1").communicate()
    names = {path.name for path in cache.iterdir()}
    for path in cache.iterdir():
        path.unlink()
    outputs = [process.communicate()[0] for process in [start("2") for _ in range(4)]]
    assert outputs == [first] * 4
    assert {path.name for path in cache.iterdir()} == names

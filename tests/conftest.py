"""Fixtures for all tests."""

from __future__ import annotations

import atexit
import gc
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from difflib import unified_diff
from pathlib import Path

import pytest

from tests.loaded import loaded_once
from tests.texts import PAIR, TINY
from tfkit.cli import main
from tfkit.plugin import manager

os.environ.pop("TFKIT_PLUGIN_DIR", None)  # the plugins of whoever runs the tests
if "TFKIT_CACHE" not in os.environ:  # the cache of whoever runs the tests stays as it is; workers share a folder
    os.environ["TFKIT_CACHE"] = tempfile.mkdtemp(prefix="tfkit_cache_")
    atexit.register(shutil.rmtree, os.environ["TFKIT_CACHE"], ignore_errors=True)
GOLDEN = Path(__file__).parent / "golden"
KINDS = re.compile(r"(= (?:known )?(?:kinds|blocks): |is a key of the [a-z ]+? (?=kinds? `)).*(?:\n +[^\s=|-].*)*")
"""Lists of kinds in errors, up to the next note. `tests/spec/test_listed_kinds.py` checks that they are complete."""
OVERLOADS: dict[str, list[object]] = {}
"""The overloads of torch's functions before any is compiled, by the name of the function."""

# Plugins are loaded once: most tests load a spec, which then takes half the time. The patch is here, before any other
# module imports the name.
manager.load_plugins = loaded_once(manager.load_plugins)
gc.disable()  # until all tests are collected


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--renew-golden", action="store_true", help="rewrite tests/golden/ with what tfkit says now")


def pytest_collection_finish() -> None:
    """Leave modules and tests out of every collection of garbage, which begin now: there are many, and they stay."""
    if (internal := sys.modules.get("torch._jit_internal")) is not None:
        OVERLOADS.update(internal._overloaded_fns)
    gc.freeze()
    gc.set_threshold(200_000, 10, 50)
    gc.enable()


def pytest_runtest_teardown() -> None:
    """Let go of the programs that torch has scripted, so that a process does not grow with each scripted model.

    torch keeps all their classes and execution plans, about 20 MB for a small T5. Programs that are still in use hold
    their compilation unit. The overloads of functions such as `interpolate`, which torch forgets once it has compiled
    them, are registered again.
    """
    recursive = sys.modules.get("torch.jit._recursive")
    if recursive is not None and recursive.concrete_type_store.type_store:
        state = sys.modules["torch.jit._state"]
        recursive.concrete_type_store = recursive.ConcreteTypeStore()
        state._clear_class_state()
        state._jit_caching_layer.clear()
        state._jit_function_overload_caching.clear()
        sys.modules["torch._jit_internal"]._overloaded_fns |= OVERLOADS
        state._python_cu = recursive._python_cu = type(state._python_cu)()


@pytest.fixture(scope="session", autouse=True)
def no_fsync() -> Iterator[None]:
    """Do not wait for the disk: no test cuts the power."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda number: None)
        yield


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """`golden(name, text)` compares with golden/<name>.txt; `pytest --renew-golden` rewrites it.

    Lists of kinds in errors are left out, so that a new kind changes few golden files.
    """

    def compare(name: str, text: str) -> None:
        __tracebackhide__ = True
        path, text = GOLDEN / f"{name}.txt", KINDS.sub(r"\1...", text)
        if request.config.getoption("--renew-golden"):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text.rstrip("\n") + "\n", encoding="utf-8")
            return
        if not path.exists():
            pytest.fail(f"no golden file {name}.txt: look at the text, then pytest --renew-golden\n\n{text}")
        expected = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
        actual = text.rstrip("\n").split("\n")
        diff = "\n".join(unified_diff(expected, actual, f"golden/{name}.txt", "now", lineterm=""))
        if diff:
            pytest.fail(f"{diff}\n\nif this is what it should say: pytest --renew-golden")

    return compare


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """`run("params", "tiny.yaml")` gives what is printed; it must end with `status`. Only code is wider than 80."""

    def call(*arguments: str, status: int = 0, stderr: bool = False) -> str:
        __tracebackhide__ = True
        plain = arguments[0].startswith("-") or arguments[0] == "list" or len(arguments) == 0
        actual = main(arguments if plain else [*arguments, "--no-plugins"])
        out, err = capsys.readouterr()
        assert actual == status, err
        assert "\x1b" not in out + err
        if not stderr:
            assert err == ""
        if "--json" not in arguments and not stderr:
            widest = 116 if arguments[0] == "build" else 80
            assert max((len(line) for line in out.splitlines()), default=0) <= widest
        return err if stderr else out

    return call


@pytest.fixture
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two specs, a wrong one among them, to stand in; a terminal of 80 columns."""
    (tmp_path / "tiny.yaml").write_text(TINY)
    (tmp_path / "pair.yaml").write_text(PAIR)
    (tmp_path / "wrong.yaml").write_text(TINY.replace("gqa", "gqqa").replace("n_layers: 2", "n_layers: two"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TFKIT_DISABLE", raising=False)
    return tmp_path

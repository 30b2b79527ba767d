"""Faults planted in a new plugin: each causes a clear message with the file and the line."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

import tfkit
from tfkit.cli import main
from tfkit.testing import check_component
from tfkit.tools.new.command import PluginNames, write_plugin

CODE = "src/tfkit_shift/__init__.py"
HOOK = "@tfkit.hookimpl\ndef tfkit_register"
FORWARD = "    def forward(self, x: Tensor) -> Tensor:\n"
Plant = Callable[..., int]
OutputOf = Callable[..., str]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new plugin, and no module of it left behind."""
    monkeypatch.setenv("COLUMNS", "400")  # paths in one line
    monkeypatch.delitem(sys.modules, "tfkit_shift", raising=False)  # of a test in another folder
    folder = tmp_path / "tfkit-shift"
    write_plugin(PluginNames("shift"), folder)
    yield folder
    sys.modules.pop("tfkit_shift", None)


@pytest.fixture
def plant(project: Path) -> Plant:
    """Replace a text of the plugin's code by another; the line of the fault, which `mark` is in."""

    def change(old: str, new: str, mark: str) -> int:
        file = project / CODE
        text = file.read_text()
        assert old in text
        file.write_text(text.replace(old, new, 1))
        (line,) = (n for n, line in enumerate(file.read_text().splitlines(), 1) if mark in line)
        return line

    return change


@pytest.fixture
def output_of(project: Path, capsys: pytest.CaptureFixture[str]) -> OutputOf:
    """The errors and warnings of a command in one line; of `plugins` the result."""

    def call(*arguments: str, status: int = 1) -> str:
        assert main([*arguments, "--no-plugins", "--plugin-dir", str(project)]) == status
        out, err = capsys.readouterr()
        assert "Traceback" not in out + err
        return " ".join((out if arguments[0] == "plugins" and status == 0 else err).split())

    return call


def test_as_it_is_written_it_works(output_of: OutputOf) -> None:
    assert "tfkit-shift" in output_of("plugins", status=0)
    assert output_of("validate", "shift_tiny", status=0) == ""


# ---- what is found when plugins are loaded ----


LEFT_OUT = {
    "a class that is returned": (
        "-> None:\n    register(ShiftConfig)",
        "-> object:\n    return ShiftConfig",
        "@tfkit.hookimpl",
        "`tfkit_register` must return nothing; got ShiftConfig: call `register` with each config",
    ),
    "no annotation": (
        "n_pieces: tfkit.Count = 2",
        "n_pieces = 2",
        "class ShiftConfig",
        "PydanticUserError: A non-annotated attribute was detected: `n_pieces = 2`",
    ),
}


@pytest.mark.parametrize("fault", LEFT_OUT)
def test_a_plugin_that_is_left_out(fault: str, plant: Plant, output_of: OutputOf, project: Path) -> None:
    """Everything else works; a spec that needs it says why, and where."""
    old, new, mark, cause = LEFT_OUT[fault]
    location = f"{project / CODE}:{plant(old, new, mark)}"
    warning = f"warning: plugin `tfkit-shift` is skipped: {cause} = {location} = help: TFKIT_DISABLE=tfkit-shift"
    assert output_of("validate", "gpt2", status=0).startswith(warning)
    assert f"{cause}{location}to".replace(" ", "") in output_of("plugins", status=0).replace(" ", "")
    text = output_of("validate", "shift_tiny")
    assert text.count(" error: ") == 1
    assert text.endswith(f"= help: it is installed and fails: {cause} ({location})")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("import tfkit\n", "import tfkit\nprint('one', 2)\n"),
        ("    register(ShiftConfig)", "    print('one', 2)\n    register(ShiftConfig)"),
    ],
)
def test_a_print(old: str, new: str, plant: Plant, project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It never gets among the results."""
    plant(old, new, "print(")
    assert main(["params", "shift_tiny", "--json", "--no-plugins", "--plugin-dir", str(project)]) == 0
    out, err = capsys.readouterr()
    json.loads(out)
    assert err == "one 2\n"


# ---- what the kit finds ----


@pytest.fixture
def failures_of(project: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], list[str]]:
    """The error of `check_component`, in a decoder."""
    monkeypatch.syspath_prepend(str(project / "src"))

    def check(only: str) -> list[str]:
        config = import_module("tfkit_shift").ShiftConfig
        plugins = tfkit.load_plugins(entry_points=False)
        with pytest.raises(AssertionError) as caught:
            check_component(config, within=["decoder"], plugins=plugins, only=[only])
        return str(caught.value).splitlines()

    return check


def test_a_forward_that_does_not_script(plant: Plant, failures_of: Callable[[str], list[str]], project: Path) -> None:
    line = plant(FORWARD, f"{FORWARD}        x = x / (1 + x.norm(dim=-1, keepdim=True))\n", "x.norm")
    _, text = failures_of("script")
    path = "stack.layers.0.ffn"
    assert text.startswith(f"- script, in a decoder: {path}: ffn kind `shift` cannot be scripted by TorchScript: ")
    assert text.endswith(f" ({project / CODE}:{line})")


def test_a_field_without_effect(plant: Plant, failures_of: Callable[[str], list[str]], project: Path) -> None:
    line = plant("    bias: ", "    floor: float = 0.0\n    bias: ", "class ShiftConfig")
    assert failures_of("fields") == [
        f"ffn kind `shift`, {project / CODE}:{line}, breaks a guarantee",
        "- fields, in a decoder: ffn kind `shift` never reads its field `floor`",
    ]


def test_steps_that_differ_from_the_whole(plant: Plant, failures_of: Callable[[str], list[str]], project: Path) -> None:
    """An FFN that reads earlier tokens has no cache for them; that is said of it, and not of what follows."""
    line = plant("return self.down(self.dropout(hidden))", "return self.down(hidden).cumsum(1)", "class ShiftConfig")
    first, text = failures_of("position-wise")
    assert first == f"ffn kind `shift`, {project / CODE}:{line}, breaks a guarantee"
    assert text.startswith(
        "- position-wise, in a decoder: ffn kind `shift`, `stack.layers.0.ffn`, looks back: positions change"
    )

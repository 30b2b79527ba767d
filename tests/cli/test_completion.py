"""Completion in shells: the suggestions, through click's protocol and through bash, and their speed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest
from click.shell_completion import ShellComplete

from tfkit.cli import cli
from tfkit.console.completion import VARIABLE

from ..known import NAMES, RUNS
from ..sampling import some


def completions(*words: str) -> list[str]:
    """Complete the last word of a command line; `<file>` stands for files that the shell completes."""
    *args, incomplete = words
    items = ShellComplete(cli, {}, "tfkit", VARIABLE).get_completions(args, incomplete)
    return [item.value if item.type == "plain" else f"<{item.type}>" for item in items]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Change to a folder with specs."""
    for path in ("mine.yaml", "notes.txt", "models/small.yaml", "models/large.yml", ".hidden/x.yaml", "one/only.yaml"):
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text("extends: gpt2\nname: mine\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_commands() -> None:
    assert completions("") == cli.list_commands(click.Context(cli))
    assert completions("exp") == ["export"]
    assert completions("no_such_command", "exp") == ["export"]


def test_runs_and_sweeps() -> None:
    assert completions("train", "minigpt") == ["minigpt_relu", "minigpt_swiglu"]
    assert completions("sweep", "minigpt") == ["minigpt"]
    assert completions("params", "minigpt_r") == ["minigpt_relu"]
    assert completions("train", "no_such_run") == ["<file>"]


def test_a_loop_of_links_is_no_folder(folder: Path) -> None:
    (folder / "loop").symlink_to("loop")
    assert completions("show", "loop") == ["<file>"]


def test_commands_of_plugins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", str(Path(__file__).parent.parent / "plugin" / "everything"))
    assert completions("de") == ["depth"]
    monkeypatch.setenv("TFKIT_PLUGIN_DIR", "no/absolute/path")
    assert completions("exp") == ["export"]


def test_the_options_of_every_command() -> None:
    for name in completions(""):
        assert {"--help", "--plugin-dir"} <= {*completions(name, "--")}


def test_folders_of_runs() -> None:
    assert completions("runs", "") == completions("runs", "a", "--baseline", "") == ["<dir>"]


def test_words_of_options() -> None:
    assert completions("export", "gpt2", "--format", "") == ["torchscript", "pt2", "aoti", "onnx", "safetensors"]
    assert completions("params", "--by=n") == ["node"]


def test_slots_and_kinds() -> None:
    assert completions("components", "--no-plugins", "no") == ["norm"]
    assert completions("components", "norm", "--no-plugins", "") == ["layernorm", "rmsnorm"]
    assert completions("components", "--plugin-dir", "notes.txt", "no") == []


def test_every_spec_argument() -> None:
    """Each argument that is a spec, or may be one, has completions, and so does --family."""
    for name in completions(""):
        command = cli.get_command(click.Context(cli), name)
        assert command is not None
        if {"spec", "specs", "before", "a"} & {str(parameter.name) for parameter in command.params}:
            assert completions(name, "gpt2_m") == ["gpt2_medium"], name
    for name in ("import", "diff"):
        assert completions(name, "--family", "gpt2_m") == ["gpt2_medium"]


def test_specs() -> None:
    assert completions("params", "") == [*NAMES, *RUNS, "mine.yaml", "models/", "one/"]
    assert completions("params", "mi")[-1] == "mine.yaml"
    assert completions("params", "gpt2", "mine") == ["mine.yaml"]
    assert completions("compare", "gpt2", "gpt2_l") == ["gpt2_large"]
    assert completions("show", "mod")[-2:] == ["models/large.yml", "models/small.yaml"]
    assert completions("show", "models/s") == ["models/small.yaml"]
    assert completions("show", "nowhere/at/all") == ["<file>"]


def test_broken_plugins_print_nothing(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "broken").mkdir()
    text = '[project]\nname = "broken"\n[project.entry-points."tfkit.specs"]\nbroken = "nowhere.specs"\n'
    (folder / "broken" / "pyproject.toml").write_text(text, encoding="utf-8")
    assert completions("show", "--plugin-dir", "broken", "gpt2_l") == ["gpt2_large"]
    assert capsys.readouterr() == ("", "")


# ---- in a process ----


@pytest.fixture
def tfkit_on_path(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a command `tfkit` on the path."""
    script = tmp_path_factory.mktemp("bin") / "tfkit"
    script.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tfkit "$@"\n', encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{script.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
@pytest.mark.usefixtures("tfkit_on_path")
def test_bash() -> None:
    cases = [(["show", "mine"], ["mine.yaml"]), (["params", "gpt2", "--by", "l"], ["layer"])]
    script = f'eval "$({VARIABLE}=bash_source tfkit)"\n'
    for words, _ in cases:
        line = " ".join(f"'{word}'" for word in ["tfkit", *words])
        script += f"COMPREPLY=(); COMP_WORDS=({line}); COMP_CWORD={len(words)}; _tfkit_completion tfkit\n"
        script += 'echo "${COMPREPLY[@]}"\n'
    done = subprocess.run(["bash", "--norc", "-c", script], capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr == ""
    for (words, expected), line in zip(cases, done.stdout.splitlines(), strict=True):
        assert line.split() == expected, words


def complete(instruction: str, **environment: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, VARIABLE: instruction, **environment}
    return subprocess.run(
        [sys.executable, "-m", "tfkit"], env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("shell", some(["zsh", "fish"], 1))
def test_other_shells(shell: str) -> None:
    assert "_tfkit_completion" in complete(f"{shell}_source").stdout
    word = "show gpt2_m" if shell == "zsh" else "gpt2_m"
    done = complete(f"{shell}_complete", COMP_WORDS="tfkit show gpt2_m", COMP_CWORD="2" if shell == "zsh" else word)
    assert "gpt2_medium" in done.stdout


def test_unknown_shell_is_an_error(golden: Callable[[str, str], None]) -> None:
    done = complete("tcsh_source")
    assert (done.returncode, done.stdout) == (2, "")
    golden("cli/completion_another_shell", done.stderr)


@pytest.mark.parametrize(
    ("words", "unused"), some([("tfkit exp", "torch pydantic yaml rich"), ("tfkit show gpt2_", "torch rich")], 1)
)
def test_it_is_quick(words: str, unused: str) -> None:
    """Completion avoids slow imports."""
    code = "import sys; from tfkit.cli import main; main(); print(*sys.modules, file=sys.stderr)"
    environment = {**os.environ, VARIABLE: "zsh_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "export" in done.stdout or "gpt2_medium" in done.stdout
    assert not {*unused.split()} & {*done.stderr.split()}

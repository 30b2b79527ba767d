"""The command line: its output, the stream of the output, and the exit status."""

from __future__ import annotations

import atexit
import gc
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import click
import pytest

from tests.sampling import slow
from tests.texts import BROKEN_PLUGIN
from tfkit.cli import cli, main

COMMANDS = cli.list_commands(click.Context(cli))
Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def script(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    """The same in a process of its own."""
    code = "import sys; from tfkit.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60, check=False, **options
    )  # type: ignore[call-overload,no-any-return]


# ---- help and usage ----


def test_help(run: Callable[..., str], golden: Golden) -> None:
    texts = [run("--help"), *(run(name, "--help") for name in COMMANDS)]
    golden("cli/help", "\n\n".join(text.rstrip() for text in texts))


def test_alone_it_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    alone = capsys.readouterr().out
    main(["--help"])
    assert alone.rstrip() == capsys.readouterr().out.rstrip()


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("unknown_command", ["parms"]),
        ("unknown_command_like_no_other", ["xyz"]),
        ("missing_argument", ["build"]),
        ("unknown_option", ["params", "tiny.yaml", "--bye", "node"]),
        ("wrong_choice", ["params", "tiny.yaml", "--by", "nodes"]),
        ("no_folder_of_plugins", ["plugins", "--plugin-dir", "nowhere"]),
        ("seed_of_more_than_64_bits", ["build", "tiny.yaml", "--seed", str(2**64)]),
        ("force_alone", ["build", "tiny.yaml", "--force"]),
        ("unknown_device", ["build", "tiny.yaml", "--device", "warp"]),
        ("meta_has_no_weights", ["build", "tiny.yaml", "--device", "meta", "-o", "out"]),
    ],
)
def test_wrong_usage(run: Callable[..., str], golden: Golden, name: str, arguments: list[str]) -> None:
    golden(f"cli/usage_{name}", run(*arguments, status=2, stderr=True))


def numbers() -> list[tuple[str, str]]:
    """Every command with each of its options that must be a number with a point."""
    context = click.Context(cli)
    commands = {name: cli.get_command(context, name) for name in COMMANDS}
    options = [(name, parameter) for name, command in commands.items() if command for parameter in command.params]
    return [
        (name, parameter.opts[0])
        for name, parameter in options
        if isinstance(parameter.type, click.types.FloatParamType)
    ]


@pytest.mark.parametrize(("command", "option"), numbers())
@pytest.mark.parametrize("value", ["nan", "-inf"])
def test_every_number_is_finite(run: Callable[..., str], command: str, option: str, value: str) -> None:
    actual = run(command, option, value, status=2, stderr=True)
    assert actual.startswith(f"error: `{option}` must be a number ")
    assert actual.splitlines()[0].endswith(f"; got {value}")


def test_help_and_usage_errors_import_little() -> None:
    code = f"""
import sys
from tfkit.cli import main
for line in {[[], ["--help"], ["parms"], ["build"], ["components", "--bye"], *([name, "--help"] for name in COMMANDS)]}:
    main(line)
heavy = "torch", "pydantic", "rich", "yaml", "tfkit.spec", "tfkit.plugin.manager"
print([name for name in heavy if name in sys.modules])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True).stdout
    assert out.splitlines()[-1] == "[]"


def test_version(run: Callable[..., str]) -> None:
    assert re.fullmatch(r"tfkit[ ,].+\n", run("--version"))


# ---- errors ----


def test_wrong_spec(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/wrong_spec", run("params", "wrong.yaml", status=1, stderr=True))


@pytest.mark.parametrize("command", ["build", "params", "show"])
def test_errors_as_json(run: Callable[..., str], command: str) -> None:
    errors = json.loads(run(command, "wrong.yaml", "--json", status=1))["errors"]
    assert [(error["path"], error["line"]) for error in errors] == [
        ("graph.decoder.n_layers", 12),
        ("graph.decoder.attention.kind", 13),
    ]


def test_set_is_checked(run: Callable[..., str]) -> None:
    assert "--set:1:" in run("params", "tiny.yaml", "--set", "decoder.n_layer=3", status=1, stderr=True)


def test_a_broken_plugin_is_one_warning(
    specs: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (specs / "broken_one.py").write_text(BROKEN_PLUGIN)
    assert main(["params", "tiny.yaml", "--json", "--plugin-dir", "broken_one.py"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)[0]["name"] == "tiny"
    assert err.startswith("warning: plugin `broken_one` is skipped: ")
    assert err.count("\n   = ") == 2
    assert f"{specs / 'broken_one.py'}:1\n" in err
    assert "there_is_no_such_module" in err
    name = re.search(r"TFKIT_DISABLE=(\S+)", err)
    assert name is not None
    monkeypatch.setenv("TFKIT_DISABLE", name[1])
    assert main(["params", "tiny.yaml", "--plugin-dir", "broken_one.py"]) == 0
    assert capsys.readouterr().err == ""


def test_interrupt(run: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("tfkit.spec.load.read_spec", interrupt)
    assert run("params", "tiny.yaml", status=130, stderr=True) == "interrupted\n"


@pytest.mark.slow
def test_broken_pipe() -> None:
    code = "import sys; from tfkit.cli import main; sys.exit(main())"
    process = subprocess.Popen(
        [sys.executable, "-c", code, "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(timeout=60) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    assert process.stderr.read() == ""
    process.stderr.close()


def test_a_launched_process_ends_without_the_finalization_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of gloo may hold tensors then, and would abort the process of a finished run."""
    calls: list[str] = []
    monkeypatch.setattr(gc, "disable", lambda: None)
    monkeypatch.setattr(gc, "freeze", lambda: None)
    monkeypatch.setattr(atexit, "_run_exitfuncs", lambda: calls.append("handlers"))
    monkeypatch.setattr(os, "_exit", lambda status: calls.append(f"exit {status}"))
    for launched in (False, True):
        for arguments, status in ((["--version"], 0), (["parms"], 2)):
            monkeypatch.setattr(sys, "argv", ["tfkit", *arguments])
            assert main() == status
        assert calls == (["handlers", "exit 0"] if launched else [])
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a file that is always full")
@pytest.mark.parametrize("arguments", ["--version", "--help", *map(slow, ["list", "params tiny.yaml --json"])])
def test_a_full_disk(arguments: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        code = "import sys; from tfkit.cli import main; sys.exit(main())"
        command = [sys.executable, "-c", code, *arguments.split()]
        done = subprocess.run(command, stdout=full, stderr=-1, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == b"error: cannot write to standard output: No space left on device\n"


@pytest.mark.slow
@pytest.mark.parametrize("words", ["list >&-", *map(slow, ["list 2>&-", "list >&- 2>&-"])])
def test_closed_streams(words: str) -> None:
    code = "import sys; from tfkit.cli import main; sys.exit(main())"
    command = f'"{sys.executable}" -c "{code}" {words}'
    done = subprocess.run(command, shell=True, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.slow
def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    (tmp_path / "gone").mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); from tfkit.cli import main; sys.exit(main())"
    for name in ("list", "params"):
        arguments = [sys.executable, "-c", code, name, *["gpt2"] * (name == "params")]
        (tmp_path / "gone").mkdir(exist_ok=True)
        folder = tmp_path / "gone"
        done = subprocess.run(arguments, cwd=folder, capture_output=True, text=True, timeout=60, check=False)
        assert (done.returncode, done.stderr) == (1, "error: the current folder does not exist any more\n")


@pytest.mark.slow
def test_styles_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "FORCE_COLOR")}
    words = ("list", "gpt2")
    assert "\x1b" in script(*words, env={**colours, "FORCE_COLOR": "1"}).stdout
    assert "\x1b" not in script(*words, env={**colours, "FORCE_COLOR": "1", "NO_COLOR": "1"}).stdout

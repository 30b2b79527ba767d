"""Commands and lines of Python in help texts, examples and reports can be run as they are printed."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import click
import pytest

import tfkit
from tfkit.cli import cli, main
from tfkit.plugin.commands import built_in_commands

ROOT = Path(__file__).parents[1]
COMMANDS = tuple(built_in_commands())
UNKNOWN = "X"
"""Stands for a value that a text takes from its context."""
FOREIGN = {"--help", "--nproc-per-node", "--local-dir", "--logdir", "--tfkit"}
"""Options of `tfkit` itself, torchrun, hf, tensorboard and pytest."""
COMMAND = re.compile(
    rf"(?:^ *|`|&& |(?:again|next): )(tfkit (?:{'|'.join(COMMANDS)})\b[^`\n]*?)(?=[`\n]|\. | [|<&\\]|$)", re.MULTILINE
)
PRINTED = re.compile(r'"tfkit"|^ +tfkit [a-z]|(?:["`]|: )tfkit [a-z]|--[a-z]', re.MULTILINE)
"""Appears in each file whose strings have commands or options."""


@cache
def command(name: str) -> click.Command:
    result = cli.get_command(click.Context(cli), name)
    assert result is not None
    return result


def fault_of(text: str) -> str | None:
    """Return what is wrong with a command; None if its command, options and number of arguments are right."""
    try:
        _, name, *words = shlex.split(text, comments=True)
        if not words:  # prose about a command
            return None
        words += [UNKNOWN] if words[-1] == "-o" else []
        _, left, _ = command(name).make_parser(click.Context(command(name))).parse_args(words)
    except (click.UsageError, ValueError) as error:
        return f"{text}: {error}"
    return f"{text}: surplus {left}" if left and UNKNOWN not in left else None


def texts_of(file: Path) -> Iterator[str]:
    """Yield the strings in a file, without docstrings of functions and classes, and the lists that begin a command."""
    text = file.read_text(encoding="utf-8")
    if not PRINTED.search(text):
        return
    nodes = list(ast.walk(ast.parse(text)))
    skipped = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and isinstance(node.body[0], ast.Expr):
            skipped.add(id(node.body[0].value))
    for node in nodes:
        match node:
            case ast.JoinedStr(values=parts):
                yield "".join(map(_word, parts))
            case ast.List(elts=[ast.Constant(value="tfkit"), *_] as words):
                yield f"`{shlex.join(_word(word) for word in words if not isinstance(word, ast.Starred))}`"
            case ast.Constant(value=str(text)) if id(node) not in skipped:
                yield text


def _word(node: ast.expr) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else UNKNOWN


SOURCES = [*ROOT.glob("tfkit/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")]


@cache
def source_texts() -> list[str]:
    return [text for file in SOURCES for text in texts_of(file)]


def test_commands_in_texts_can_be_parsed() -> None:
    commands = {match[1] for text in source_texts() for match in COMMAND.finditer(text)}
    assert len(commands) > 80
    assert not [fault for fault in map(fault_of, sorted(commands)) if fault]


def test_commands_in_golden_files_can_be_parsed() -> None:
    files = [file for file in (ROOT / "tests" / "golden").rglob("*") if file.is_file()]
    texts = [file.read_text(encoding="utf-8").replace("\\\n", " ") for file in files]
    commands = {match[1] for text in texts for match in COMMAND.finditer(text)}
    assert len(commands) > 20
    assert not [fault for fault in map(fault_of, sorted(commands)) if fault]


def test_options_in_texts_exist() -> None:
    names = {name for word in COMMANDS for param in command(word).params for name in param.opts}
    prose = (text for text in source_texts() if " " in text.strip() and "var(--" not in text)
    options = {option for text in prose for option in re.findall(r"(?<![\w-])--[a-z][a-z-]+(?![\w*])", text)}
    assert not sorted(options - names - FOREIGN)


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_of_one_value_refuses_a_second(name: str) -> None:
    options = [param for param in command(name).params if isinstance(param, click.Option)]
    for option in options:
        for first in option.opts:
            context = click.Context(command(name))
            if not option.multiple and not option.is_flag:
                with pytest.raises(click.UsageError, match=f"`{option.opts[-1]}` takes one value; got 2"):
                    command(name).parse_args(context, [first, "3", option.opts[-1], "5"])
    alternatives = {option.opts[-1]: option for option in options if option.name == "form"}
    if alternatives:
        with pytest.raises(click.UsageError, match="`--latex` cannot be combined with `--markdown`"):
            command(name).parse_args(click.Context(command(name)), ["--latex", "--markdown"])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a model and a folder of a plugin, all with spaces in their names."""
    folder = tmp_path / "a folder"
    (folder / "my plugins").mkdir(parents=True)
    (folder / "my plugins" / "plain.py").write_text("", encoding="utf-8")
    (folder / "my model.yaml").write_text("extends: gpt2\nname: mine\n" + "\n".join(MODEL), encoding="utf-8")
    monkeypatch.chdir(folder)
    return folder


MODEL = ["d_model: 16", "vocab_size: 70", "graph: {decoder: {n_layers: 2, attention: {n_heads: 2}, ffn: {d_ff: 32}}}"]
OPTIONS = ["--plugin-dir", "my plugins", "--no-plugins"]


def test_a_command_in_an_error_has_the_options_of_its_caller(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tfkit.save(tfkit.build("my model.yaml"), "their model", layout="huggingface")
    Path("their model/spec.yaml").unlink()
    assert main(["params", "their model", *OPTIONS]) == 1
    line = re.findall(r"`(tfkit [^`]*)`", capsys.readouterr().err)[0]
    assert shlex.split(line)[-2:] == ["--plugin-dir=my plugins", "--no-plugins"]
    assert main(shlex.split(line)[1:]) == 0
    assert main(["params", "their model", *OPTIONS]) == 0


def test_the_commands_of_a_report_run_as_printed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["solve", "my model.yaml", "--params", "12k", "--set", "max_len=8", *OPTIONS]) == 0
    commands = capsys.readouterr().out.replace("\\\n", "").split("\n\n")[2:]
    assert commands
    for line in commands:
        assert "--plugin-dir=my plugins" in shlex.split(line)
        assert main([*shlex.split(line)[1:], "--json"]) == 0
        assert abs(json.loads(capsys.readouterr().out)[0]["total"] - 12_000) < 3_000
    assert main(["new", "run", "my model.yaml", "-o", "my run.yaml", *OPTIONS]) == 0
    line = capsys.readouterr().out.partition("next: ")[2].strip()
    assert shlex.split(line) == ["tfkit", "train", "my run.yaml", "--plugin-dir=my plugins", "--no-plugins"]


SETS = ["d_model=16", "vocab_size=32", "decoder.n_layers=1", "decoder.attention.n_heads=2", "decoder.ffn.d_ff=32"]

"""Give wrong values to every argument and option of every command, and report errors that do not help.

    python tools/wrong_values.py                all commands
    python tools/wrong_values.py build tokens   some commands

A command that fails must end with status 1 or 2, without a traceback, with errors on stderr that name the wrong value,
its file or its option. Each command runs in a forked process, in a new folder, for at most `SECONDS`.
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200"}

import click
import torch

import tfkit
from tfkit.cli import cli, main
from tfkit.errors import printable_text

SECONDS = 20
SMALL_SIZES = [
    "d_model=16",
    "vocab_size=70",
    "decoder.n_layers=1",
    "decoder.attention.n_heads=2",
    "decoder.ffn.d_ff=32",
]
SET = "--set model.d_model=16 --set model.decoder.n_layers=1 --set model.decoder.attention.n_heads=2"
CALLS = {
    "attention": "model --tokens 1,2 -o out.svg",
    "build": "model",
    "check": "model --only causal",
    "compare": "model model",
    "components": "ffn",
    "cost": "model",
    "diff": "model small.yaml",
    "draw": "model -o out.svg",
    "eject": "model -o out.py",
    "eval": "minigpt_relu --weights model",
    "export": "model -o out.pt",
    "generate": "model --tokens 1,2 --max-new-tokens 2",
    "grow": "model n_layers=4",
    "import": "published",
    "list": "gpt2",
    "new": "run nanogpt -o out.yaml",
    "params": "model",
    "plugins": "",
    "profile": "model --steps 2",
    "runs": "published",
    "save": "model --layout tfkit -o out",
    "schema": "-o out.json",
    "show": "model",
    "solve": "model --params 20k",
    "sweep": "swiglu --plan",
    "tensors": "published",
    "tokenizer": "text.txt --vocab-size 300 -o out.json",
    "tokens": "text.txt --tokenizer chars.json -o out.npy",
    "train": "minigpt_relu --plan",
    "validate": "model",
}
"""For each command, arguments that are right."""
VALUES = {
    "empty": "",
    "word": "no-such-name",
    "negative": "-3",
    "zero": "0",
    "huge": "9" * 400,
    "fraction": "1.5",
    "infinite": "inf",
    "not a number": "nan",
    "list": "[1, 2]",
    "mapping": "{a: 1}",
    "deep": "[" * 2000,
    "path with spaces": "a folder/no file.yaml",
    "folder": "a folder",
    "empty file": "empty.yaml",
    "binary file": "binary.yaml",
    "JSON of a list": "list.json",
    "cut JSON": "cut.json",
    "deep JSON": "deep.json",
    "folder with a damaged config": "damaged",
    "below a file": "empty.yaml/below",
    "long name": "n" * 300,
    "not UTF-8": os.fsdecode(b"\xff\xfe"),
    "escape": "\x1b[2Jx",
    "not assigned": "d_model",
    "unknown path": "no.such.path=3",
}


def write_files() -> None:
    """Write the files that the calls and the values name."""
    tfkit.save(tfkit.build(tfkit.load("gpt2", sets=SMALL_SIZES)), "model")
    tfkit.save(tfkit.build("model"), "published", layout="huggingface")
    Path("small.yaml").write_text("extends: gpt2\nname: small\n", encoding="utf-8")
    Path("text.txt").write_text("a text of words and lines\n" * 40, encoding="utf-8")
    tfkit.CharacterTokenizer("abcdefghilnorstwx \n").save(Path("chars.json"))
    Path("a folder").mkdir()
    Path("damaged").mkdir()
    Path("damaged/config.json").write_text('{"model_type": "gpt2",\n "n_layer": }', encoding="utf-8")
    Path("empty.yaml").touch()
    Path("binary.yaml").write_bytes(bytes(range(256)))
    Path("list.json").write_text("[1, 2]", encoding="utf-8")
    Path("cut.json").write_text('{"a":', encoding="utf-8")
    Path("deep.json").write_text('{"a":' * 100_000, encoding="utf-8")


def calls_of(name: str) -> Iterator[tuple[str, list[str]]]:
    """Yield the names and arguments of the calls of a command, each with a wrong value in the place of one argument."""
    command = cli.get_command(click.Context(cli), name)
    assert command is not None
    words = CALLS[name].split()
    positions = [
        index for index, word in enumerate(words) if not word.startswith("-") and not words[index - 1].startswith("-")
    ]
    for what, value in VALUES.items():
        for index in positions:
            call = [*words[:index], *words[index + 1 :]]
            yield (
                f"argument {index}, {what}",
                [*call, "--", value] if value.startswith("-") else [*words[:index], value, *words[index + 1 :]],
            )
        for option in command.params:
            if isinstance(option, click.Option) and not option.is_flag:
                rest = words
                for spelling in option.opts:
                    if spelling in rest:
                        at = rest.index(spelling)
                        rest = [*rest[:at], *rest[at + 2 :]]
                short = option.opts[-1]
                yield f"{short}, {what}", [*rest, *([f"{short}={value}"] if short.startswith("--") else [short, value])]


def fault_of(arguments: list[str], argument: str, value: str) -> str | None:
    """Run a command in a forked process, and return what is wrong with its error."""
    reader, writer = os.pipe()
    process = os.fork()
    if not process:
        os.close(reader)
        with os.fdopen(writer, "w", encoding="utf-8", errors="replace") as answer:
            answer.write(_fault(arguments, argument, value) or "")
        os._exit(0)
    os.close(writer)
    began = time.monotonic()
    while os.waitpid(process, os.WNOHANG) == (0, 0):
        if time.monotonic() - began > SECONDS:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            os.close(reader)
            return f"took more than {SECONDS} s"
        time.sleep(0.005)
    with os.fdopen(reader, encoding="utf-8") as answer:
        return answer.read() or None


def _fault(arguments: list[str], argument: str, value: str) -> str | None:
    out, err = io.TextIOWrapper(io.BytesIO()), io.StringIO()
    try:
        with redirect_stdout(out), redirect_stderr(err):
            status = main(arguments)
    except BaseException as error:  # a panic of a library is no Exception
        last = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {' '.join(str(error).split())[:100]} ({last.filename}:{last.lineno})"
    text = err.getvalue()
    if status == 0:
        return None
    if status not in (1, 2):
        return f"status {status}: {text[:200]}"
    if "Traceback" in text or not re.search(r"^error: ", text, re.MULTILINE):
        return f"no error: {text[-300:]}"
    excerpt = printable_text(value)[:40]
    names_it = excerpt in text.replace("\n     ", " ") or argument in text
    if not names_it and len(value) < 50:
        return f"the value is not named: {text[:300]}"
    return None


def run(names: list[str]) -> int:
    """Run the calls of commands; return the number of faults."""
    faults, count = 0, 0
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        torch.set_num_threads(1)
        write_files()
        for name in names:
            for what, arguments in calls_of(name):
                value = VALUES[what.partition(", ")[2]]
                fault, count = fault_of([name, *arguments], what.partition(",")[0], value), count + 1
                if fault:
                    faults += 1
                    print(f"{name}, {what}: {fault}", flush=True)
    print(f"{count} calls, {faults} faults")
    return faults


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:] or list(CALLS)) > 0)

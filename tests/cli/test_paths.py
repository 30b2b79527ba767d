"""Paths that lead nowhere, and odd ones that are legal, in every place of the command line that takes one."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from itertools import cycle, product
from pathlib import Path

import pytest

import tfkit
from tfkit.checkpoint.files import Checkpoint
from tfkit.cli import main
from tfkit.decoding.text import load_tokenizer
from tfkit.tools.common.atomic_files import names_in, write_file
from tfkit.tools.import_.importing import import_config

from ..sampling import chosen, slow
from ..tools.conftest import DECODER

BAD = {"loop": "loop", "long": "a" * 300, "through": "file/below"}
"""A loop of links, a name that no file system takes, and a folder that is a file."""
ODD = ("line\nbreak", "\x1b[2J", os.fsdecode(b"\xff"))
"""Names that a file may have, and that no terminal and no encoding should be given as they are."""

PUBLISHED = Path(__file__).parents[1] / "published"
FILES = {
    "draw": (["draw", "spec.yaml", "-o"], ".svg"),
    "eject": (["eject", "spec.yaml", "-o"], ".py"),
    "export": (["export", "spec.yaml", "-o"], ".safetensors"),
    "import": (["import", "config.json", "-o"], ".yaml"),
    "schema": (["schema", "-o"], ".json"),
    "solve": (["solve", "spec.yaml", "--params", "10000", "-o"], ".yaml"),
}
FOLDERS = {
    "build": ["build", "spec.yaml", "-o"],
    "new": ["new", "plugin", "shift", "-o"],
    "profile": ["profile", "spec.yaml", "--mode", "prefill", "--steps", "2", "--warmup", "0", "--length", "4", "-o"],
    "save": ["save", "spec.yaml", "--weights", "model.safetensors", "--layout", "tfkit", "-o"],
}
ON_A_SPEC = ("build", "params", "generate", "explain", "draw", "cost", "export", "eject", "show", "profile", "validate")
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
    "save WEIGHTS": ["save", "spec.yaml", "--weights", "{}", "--layout", "tfkit", "-o", "out"],
    "build WEIGHTS": ["build", "spec.yaml", "--weights", "{}"],
    "export WEIGHTS": ["export", "spec.yaml", "--weights", "{}", "-o", "out.ts"],
    "profile WEIGHTS": ["profile", "spec.yaml", "--weights", "{}"],
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
    Path("text").write_text("abc")
    Path("file").write_text("")
    Path("config.json").write_text((PUBLISHED / "distilgpt2.json").read_text())
    for end in ("", ".svg", ".py", ".safetensors", ".yaml", ".json", ".ts"):
        Path(f"loop{end}").symlink_to(f"loop{end}")
    yield tmp_path
    assert not list(tmp_path.rglob(".*"))


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


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FILES)
def test_a_file_that_cannot_be_written(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, suffix = FILES[name]
    assert "cannot write" in refused(capsys, *words, f"{BAD[bad]}{suffix}")


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_that_cannot_be_written(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "cannot write" in refused(capsys, *FOLDERS[name], BAD[bad])


@pytest.mark.parametrize("name", FILES)
def test_a_folder_where_a_file_is_wanted(name: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words, suffix = FILES[name]
    (folder / f"there{suffix}").mkdir()
    assert re.search("is a (folder|directory)", refused(capsys, *words, f"there{suffix}"))
    assert "its folder does not exist" in refused(capsys, *words, f"nowhere/a{suffix}")


@pytest.mark.parametrize("name", FOLDERS)
def test_a_file_where_a_folder_is_wanted(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert "is a file" in refused(capsys, *FOLDERS[name], "file")


@pytest.mark.parametrize(("name", "bad"), chosen(product(INPUTS, BAD), {*zip(INPUTS, cycle(BAD))}))
def test_what_cannot_be_read(name: str, bad: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused(capsys, *(word.format(BAD[bad]) for word in INPUTS[name]))


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


def test_a_zero_byte(folder: Path) -> None:
    """No command line can have one, a caller in Python can."""
    path = folder / "zero\0byte"
    for call in (
        lambda: tfkit.load(path.with_suffix(".yaml")),
        lambda: Checkpoint.open(path),
        lambda: import_config(path),
        lambda: write_file(path, ""),
        lambda: names_in(path),
        lambda: load_tokenizer(path),
    ):
        with pytest.raises(tfkit.SpecError, match=r"cannot (read|write).* null byte"):
            call()

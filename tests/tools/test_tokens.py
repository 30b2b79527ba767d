"""`tfkit tokens`: ids do not depend on chunks and processes; runs read them, and compute their digest once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import tfkit
from tests.run.kinds.small import refused, small_run
from tests.run.training.runs import TEXT as LINES
from tfkit.cli import main
from tfkit.run.kinds import tokens as kind
from tfkit.tools import tokens as tool
from tfkit.tools.tokenizer import train_tokenizer

SEPARATOR = "<|end|>"
TEXT = LINES.replace("1 goats went up the hill.\n", "1 goats. \n\n\n  ")
"""Lines, some of which end in white space, or are empty."""


@pytest.fixture
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with texts, and a tokenizer of them; chunks have 200 characters."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tool, "CHUNK", 200)
    train_tokenizer([TEXT], vocab_size=400, special=[SEPARATOR]).save("tokenizer.json")
    Path("text.txt").write_text(TEXT, encoding="utf-8")
    rows = [{"body": f"row {number}\nof many"} for number in range(40)]
    Path("rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")


def tokens(*arguments: str) -> int:
    return main(["tokens", "--tokenizer", "tokenizer.json", *arguments])


@pytest.mark.usefixtures("_in_folder")
def test_ids_are_those_of_each_text_at_once() -> None:
    assert tokens("text.txt", "-o", "text.npy", "--processes", "1") == 0
    tokenizer = tfkit.FileTokenizer.read(Path("tokenizer.json"))
    assert np.load("text.npy").dtype == np.uint16
    assert np.load("text.npy").tolist() == tokenizer.encode(TEXT)
    rows = ["text.txt", "rows.jsonl", "--column", "body", "--separator", SEPARATOR]
    assert tokens(*rows, "-o", "all.npy", "--processes", "1") == 0
    texts = [TEXT, *(f"row {number}\nof many" for number in range(40))]
    assert np.load("all.npy").tolist() == [token for text in texts for token in (*tokenizer.encode(text), 0)]


@pytest.mark.usefixtures("_in_folder")
def test_the_table_has_the_rates_of_the_json(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = count(5.0, 1e-5)
    monkeypatch.setattr(tool, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    assert tokens("text.txt", "-o", "text.npy", "--processes", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["seconds"] == pytest.approx(1e-5)
    assert tokens("text.txt", "-o", "other.npy", "--processes", "1") == 0
    rows = [line.rsplit(maxsplit=1) for line in capsys.readouterr().out.splitlines() if line.strip()]
    table = {row[0].strip(): row[1] for row in rows if len(row) == 2}
    assert table["bytes"] == f"{report['bytes']:,}"
    assert table["tokens"] == f"{report['tokens']:,}"
    assert table["bytes per token"] == f"{report['bytes'] / report['tokens']:.2f}"
    assert float(table["MB per second"]) == pytest.approx(report["bytes"] / 1e6 / 1e-5, rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("_in_folder")
def test_processes_change_nothing() -> None:
    assert tokens("text.txt", "-o", "one.npy", "--processes", "1") == 0
    assert tokens("text.txt", "-o", "two.npy", "--processes", "2") == 0
    assert Path("one.npy").read_bytes() == Path("two.npy").read_bytes()


@pytest.mark.slow
@pytest.mark.usefixtures("_in_folder")
def test_a_kill_leaves_no_file_and_no_process() -> None:
    Path("long.txt").write_text(TEXT * 3000, encoding="utf-8")
    arguments = ["tokens", "long.txt", "--tokenizer", "tokenizer.json", "-o", "long.npy", "--processes", "2"]
    process = subprocess.Popen([sys.executable, "-m", "tfkit", *arguments], cwd=os.getcwd())
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not (names := children.read_text().split()[1:]):  # the first child tracks resources
        time.sleep(0.1)
    time.sleep(1)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not Path("long.npy").exists()
    time.sleep(4)
    assert not [child for child in names if Path(f"/proc/{child}/stat").exists()]
    assert tokens("text.txt", "-o", "long.npy", "--processes", "1") == 0
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


@pytest.mark.usefixtures("_in_folder")
def test_errors(capsys: pytest.CaptureFixture[str], golden: Callable[[str, str], None]) -> None:
    Path("latin.txt").write_bytes(b"caf\xe9")
    Path("empty.txt").write_text("", encoding="utf-8")
    calls = [["text.txt", "-o", "out.bin"], ["rows.jsonl", "-o", "out.npy"]]
    calls += [["text.txt", "--column", "body", "-o", "out.npy"], ["absent.txt", "-o", "out.npy"]]
    calls += [[name, "--processes", "1", "-o", "out.npy"] for name in ("latin.txt", "empty.txt")]
    calls += [["rows.jsonl", "--separator", part, "--processes", "1", "-o", "out.npy"] for part in ("a b", SEPARATOR)]
    for call in calls:
        assert tokens(*call) != 0
    assert main(["tokens", "text.txt", "--tokenizer", "rows", "-o", "out.npy"]) != 0
    assert not Path("out.npy").exists()
    golden("cli/tokens_errors", capsys.readouterr().err)


# ---- what a run reads ----


def test_nanogpt_files_are_read(tmp_path: Path) -> None:
    ids = np.arange(600) % 90
    np.save(tmp_path / "ids.npy", ids)
    ids.astype("<u2").tofile(tmp_path / "ids.bin")
    (tmp_path / "odd.bin").write_bytes(b"abc")
    digests = {
        small_run(tmp_path, f"{{kind: tokens, files: {name}}}", length=20).digest for name in ("ids.npy", "ids.bin")
    }
    assert len(digests) == 1
    assert "`odd.bin` must contain 16-bit ids" in refused(tmp_path, "{kind: tokens, files: odd.bin}", length=20)


def test_a_digest_is_computed_once_for_each_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    read = kind._read_through
    monkeypatch.setattr(kind, "_read_through", lambda files: calls.append(1) or read(files))
    for name in "ab":
        np.save(tmp_path / f"{name}.npy", np.arange(600) % 90)

    def digest(*files: str) -> str:
        return small_run(tmp_path, f"{{kind: tokens, files: [{', '.join(files)}]}}", length=20).digest

    first = digest("a.npy", "b.npy")
    assert digest("a.npy", "b.npy") == first
    assert len(calls) == 1
    np.save(tmp_path / "b.npy", np.arange(1, 601) % 90)
    assert digest("a.npy", "b.npy") != first
    assert len(calls) == 2
    (tmp_path / "a.npy.digest").write_text("{", encoding="utf-8")
    assert digest("a.npy", "b.npy") != first
    assert len(calls) == 3

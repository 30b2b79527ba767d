"""Every reader of files from users rejects a faulty file with one error that names it, and never waits or runs on."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tfkit.decoding.text import load_tokenizer
from tfkit.errors import Invalid, SpecError
from tfkit.plugin.manager import load_plugins
from tfkit.run.kinds.columns import DocumentsConfig
from tfkit.run.kinds.text import BytesConfig, FileConfig, TextConfig
from tfkit.run.kinds.tokens import TokensConfig
from tfkit.run.read_rows import read_rows
from tfkit.run.read_run import read_run
from tfkit.run.read_sweep import read_sweep
from tfkit.run.run_facts import read_facts
from tfkit.spec.load import read_spec
from tfkit.tools.common.history import read_metric_lines
from tfkit.tools.generate.prompts import _read_text
from tfkit.tools.import_.importing import import_config
from tfkit.tools.tokens import _file_chunks

PLUGINS = load_plugins()
DEEP = "[" * 100_000 + "]" * 100_000


def rows(path: Path) -> object:
    return list(read_rows(path))


def folder_rows(path: Path) -> object:
    return list(read_rows(path.parent))


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "text": ("text.txt", lambda path: TextConfig(files=str(path), tokenizer=BytesConfig()).build(4)),
    "jsonl": ("rows.jsonl", rows),
    "csv": ("rows.csv", rows),
    "tsv": ("rows.tsv", rows),
    "parquet": ("rows.parquet", rows),
    "arrow": ("rows.arrow", rows),
    "datasets": ("state.json", folder_rows),
    "npy": ("ids.npy", lambda path: TokensConfig(files=str(path)).build(4)),
    "bin": ("ids.bin", lambda path: TokensConfig(files=str(path)).build(4)),
    "tfkit tokens": ("corpus.txt", lambda path: list(_file_chunks([path], "text"))),
    "tokenizer": ("tokenizer.json", lambda path: FileConfig(path=str(path)).build("")),
    "tokenizer of a model": ("tokenizer.json", load_tokenizer),
    "prompt": ("prompt.txt", _read_text),
    "spec": ("spec.yaml", lambda path: read_spec(path, PLUGINS)),
    "run": ("run.yaml", lambda path: read_run(path, PLUGINS)),
    "sweep": ("sweep.yaml", lambda path: read_sweep(path, PLUGINS)),
    "metrics": ("metrics.jsonl", lambda path: read_metric_lines(path.parent)),
    "facts": ("run.json", lambda path: read_facts(path.parent)),
    "config": ("config.json", lambda path: import_config(path, plugins=PLUGINS)),
}
JSON = {"jsonl", "datasets", "tokenizer", "tokenizer of a model", "metrics", "facts", "config"}
TEXTS = {"text", "tfkit tokens", "prompt", *JSON, "csv", "tsv", "spec", "run", "sweep"}
IN_MEMORY = {"text", "tfkit tokens", "prompt", "tokenizer", "tokenizer of a model", "metrics", "facts"}
"""Readers whose files may have any size, and are read completely."""


def pipe(path: Path) -> None:
    os.mkfifo(path)


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


def text(content: str) -> Callable[[Path], object]:
    return lambda path: path.write_text(content + "\n", encoding="utf-8")


def not_utf_8(path: Path) -> None:
    path.write_bytes('{"text": "caf\N{LATIN SMALL LETTER E WITH ACUTE}"}\n'.encode("latin-1"))


FAULTS: dict[str, tuple[Callable[[Path], Any], set[str]]] = {
    "pipe": (pipe, READERS.keys() - {"prompt", "tokenizer", "tokenizer of a model", "spec", "run", "sweep"}),
    "device": (lambda path: path.symlink_to("/dev/zero"), READERS.keys() - {"spec", "run", "sweep"}),
    "folder": (lambda path: path.mkdir(), READERS.keys() - {"jsonl", "csv", "tsv", "parquet", "arrow"}),
    "empty": (lambda path: path.touch(), READERS.keys() - {"jsonl", "csv", "tsv", "tfkit tokens", "prompt", "metrics"}),
    "sparse": (sparse, READERS.keys() - IN_MEMORY - {"bin"}),  # zeros are valid ids
    "not UTF-8": (not_utf_8, TEXTS),
    "broken JSON": (text('{"step": 1, "loss": '), JSON),
    "deep JSON": (text(DEEP), JSON),
    "list": (text("[1, 2]"), JSON),
    "duplicate key": (text('{"step": 1, "loss": 2.0, "loss": 3.0}'), JSON - {"tokenizer", "tokenizer of a model"}),
}


@pytest.fixture(autouse=True)
def guarded_by_an_alarm() -> Iterator[None]:
    def fail(*_: object) -> None:
        raise AssertionError("the reader waits or runs on")

    before = signal.signal(signal.SIGALRM, fail)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_file_is_one_error_that_names_it(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tfkit.run.read_rows.MAX_LINE", 2**16)
    write, names = FAULTS[fault]
    failures = {}
    for index, (name, (file, read)) in enumerate(READERS.items()):
        if name not in names:
            continue
        path = Path(f"folder{index}", file)
        path.parent.mkdir()
        write(path)
        signal.alarm(10)
        try:
            failures[name] = f"no error: {read(path)!r:.100}"
        except (SpecError, Invalid) as error:
            message = str(error)
            if file not in message and str(path.parent) not in message:
                failures[name] = message
        except BaseException as error:
            failures[name] = f"{type(error).__name__}: {error!s:.200}"
        if "waits" in failures.get(name, ""):
            break
    assert not failures


def test_a_digest_next_to_tokens_is_read_only_if_it_is_sound(tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(80) % 7)
    config, digest = TokensConfig(files=str(tmp_path / "ids.npy")), tmp_path / "ids.npy.digest"
    content, sound = config.build(4).fingerprint, digest.read_bytes()
    stored = tmp_path / "stored.json"
    stored.write_bytes(sound.replace(content.encode(), b"0" * 64))
    digest.write_bytes(stored.read_bytes())
    assert config.build(4).fingerprint == "0" * 64
    for write in (pipe, sparse, text(DEEP), text("{}"), lambda path: path.symlink_to(stored)):
        digest.unlink()
        write(digest)
        assert config.build(4).fingerprint == content
        assert (digest.is_symlink(), digest.read_bytes()) == (False, sound)
    digest.write_bytes(sound.replace(content.encode(), b"../other"))
    assert config.build(4).fingerprint == content


def test_a_folder_of_datasets_names_only_its_own_files(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "state.json").write_text('{"_data_files": [{"filename": "../other/x.arrow"}]}', encoding="utf-8")
    with pytest.raises(Invalid, match=r"must name files of the folder; got `\.\./other/x\.arrow`"):
        rows(folder)


WORDS = {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "?"}
PANICS: dict[str, dict[str, Any]] = {
    "read": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "encode": {"pre_tokenizer": {"type": "FixedLength", "length": 0}},
    "encode without a token": {},
    "decode": {"decoder": {"type": "Strip", "content": "a", "start": 5, "stop": 9}},
}


@pytest.mark.parametrize("task", PANICS)
def test_a_tokenizer_whose_library_panics_is_named(task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path, named = Path("panics.json"), "tokenizer `panics.json`"
    path.write_text(json.dumps({"version": "1.0", "added_tokens": [], "model": WORDS} | PANICS[task]), encoding="utf-8")

    def use() -> None:
        tokenizer = load_tokenizer(path)
        assert tokenizer.decode([0, 1]) if task == "decode" else tokenizer.encode("ac")

    with pytest.raises(SpecError, match=named):
        use()
    if task != "decode":
        Path("rows.jsonl").write_text('{"text": "ac"}\n' * 9, encoding="utf-8")
        with pytest.raises(Invalid, match=named):
            DocumentsConfig(files="rows.jsonl", tokenizer=FileConfig(path=str(path))).build(2)

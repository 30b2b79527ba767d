"""A trained tokenizer in a run, and a profile in its record."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers

from tests.run.training.runs import TEXT, trained
from tfkit.cli import main
from tfkit.errors import Invalid, SpecError
from tfkit.run.contract import IGNORE_INDEX
from tfkit.run.kinds.examples import Windows
from tfkit.tools.tokenizer import train_tokenizer

from .small import PLUGINS, refused, small_run

DATA = "{kind: text, files: sheep.txt, tokenizer: {kind: file, path: bpe.json}}"


def write(folder: Path, size: int = 300) -> tokenizers.Tokenizer:
    (folder / "sheep.txt").write_text(TEXT, encoding="utf-8")
    tokenizer = train_tokenizer([TEXT], vocab_size=size, special=["<|end|>"])
    tokenizer.save(str(folder / "bpe.json"))
    return tokenizer


def test_the_tokens_are_those_of_the_library(tmp_path: Path) -> None:
    built = write(tmp_path)
    data = small_run(tmp_path, DATA, "data.split={train: 1.0}", length=12).data
    assert data.vocab_size == 300
    windows = data.examples("train", "sequential")
    batch = windows.batch(np.arange(len(windows)))
    ids = built.encode(TEXT).ids
    assert batch.inputs["tokens"].ravel()[: len(ids) - 1].tolist() == ids[:-1]
    assert data.tokenizer is not None
    assert data.tokenizer.decode(ids) == TEXT
    counts = data.tokenizer.byte_counts()
    assert sum(counts[token] for token in ids) == len(TEXT.encode())
    assert counts[built.token_to_id("<|end|>")] == 0


@pytest.mark.parametrize(("size", "count"), [(12, 3), (13, 3), (14, 4)])
def test_windows_predict_each_token_of_a_stream_once(size: int, count: int) -> None:
    """Except the first token. Every window has a target."""
    windows = Windows(np.arange(size), 4, stride=4)
    assert len(windows) == count
    targets = windows.batch(np.arange(count)).ids
    assert targets[targets != IGNORE_INDEX].tolist() == [*range(1, size)]
    assert (targets != IGNORE_INDEX).any(axis=1).all()
    assert len(Windows(np.arange(size), 4, stride=1)) == size - 4


def test_another_tokenizer_is_another_run(tmp_path: Path) -> None:
    write(tmp_path, 300)
    first = small_run(tmp_path, DATA, "data.split={train: 1.0}", length=12)
    write(tmp_path, 290)
    other = small_run(tmp_path, DATA, "data.split={train: 1.0}", length=12)
    assert first.data.fingerprint != other.data.fingerprint


def test_errors(tmp_path: Path, golden: Callable[[str, str], None]) -> None:
    write(tmp_path)
    (tmp_path / "chars.json").write_text('{"characters": "abc"}')
    paths = ("absent.json", "chars.json", "sheep.txt")
    golden(
        "runs/tokenizer_errors",
        "\n\n".join(refused(tmp_path, DATA.replace("bpe.json", path), length=12) for path in paths),
    )


def test_bytes_of_tokens_that_are_not_bytes(tmp_path: Path) -> None:
    (tmp_path / "sheep.txt").write_text(TEXT, encoding="utf-8")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0, "sheep": 1}, unk_token="[UNK]"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    words.save(str(tmp_path / "bpe.json"))
    run = small_run(tmp_path, DATA, "eval={every: 1, splits: {val: all}, metrics: [bits_per_byte]}", length=12)
    with pytest.raises(SpecError, match="cannot count the bytes of the tokenizer: its tokens are not bytes"):
        trained(run)


def test_a_profile_is_a_text_of_the_record(tmp_path: Path) -> None:
    profile = "callbacks=[{kind: profile, after: 1, steps: 2, rows: 5}]"
    memory, weights = trained(small_run(tmp_path, "{kind: addition}", "steps=5", profile))
    _, plain = trained(small_run(tmp_path, "{kind: addition}", "steps=5"))
    (actual,) = [(line["step"], line["profile"]) for line in memory.lines if "profile" in line]
    assert actual[0] == 3
    assert "Self CPU" in actual[1]
    assert "aten::" in actual[1]
    assert all((weights[name] == plain[name]).all() for name in plain)
    early, _ = trained(small_run(tmp_path, "{kind: addition}", "steps=2", profile))
    assert [line["step"] for line in early.lines if "profile" in line] == [2]


# ---- the command ----


def test_the_command_trains_one(run: Callable[..., str], specs: Path, golden: Callable[[str, str], None]) -> None:
    (specs / "sheep.txt").write_text(TEXT, encoding="utf-8")
    (specs / "latin.txt").write_bytes(b"caf\xe9")
    (specs / "empty.txt").write_text("")
    golden("cli/tokenizer", run("tokenizer", "sheep.txt", "--vocab-size", "300", "-o", "a.json"))
    report = json.loads(run("tokenizer", "sheep.txt", "--vocab-size", "300", "-o", "b.json", "--json"))
    tokenizer = tokenizers.Tokenizer.from_file("a.json")
    text = "Grüße, 3 sheep \U0001f411\n\x00"
    assert tokenizer.decode(tokenizer.encode(text).ids) == text
    assert tokenizer.get_vocab_size() == report["vocab_size"] == 300
    assert len(tokenizer.encode(TEXT).ids) == report["tokens"]
    assert Path("a.json").read_bytes() == Path("b.json").read_bytes()
    (specs / "umlauts.txt").write_text("Grüße, é" * 20, encoding="utf-8")
    umlauts = json.loads(run("tokenizer", "umlauts.txt", "sheep.txt", "--vocab-size", "270", "-o", "e.json", "--json"))
    assert umlauts["bytes"] == report["bytes"] + 20 * len("Grüße, é".encode())
    size = ("--vocab-size", "300", "-o")
    errors = [
        run("tokenizer", "absent.txt", *size, "c.json", status=1, stderr=True),
        run("tokenizer", "latin.txt", *size, "c.json", status=1, stderr=True),
        run("tokenizer", "empty.txt", *size, "c.json", status=1, stderr=True),
        run("tokenizer", "sheep.txt", "--vocab-size", "9999", "-o", "d.json", stderr=True),
    ]
    assert not Path("c.json").exists()
    for arguments in (
        (*size, "c.txt"),
        ("--vocab-size", "256", "-o", "c.json", "--special", "<s>"),
        (*size, "c.json", "--special", "<s>", "--special", "<s>"),
    ):
        assert main(["tokenizer", "sheep.txt", *arguments]) == 2
    golden("cli/tokenizer_errors", "\n".join(errors))


def test_the_folder_of_a_tokenizer_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[dict[str, Any]]()

    def from_pretrained(path: str, **options: Any) -> Any:
        calls.append(options)
        raise ValueError

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", from_pretrained)
    config: Any = PLUGINS.registry.kinds("tokenizer")["pretrained"].config(path=str(tmp_path))
    with pytest.raises(Invalid, match="must be a tokenizer that transformers can read"):
        config.build("")
    assert calls == [{"local_files_only": True, "trust_remote_code": False}]

"""Files that `SECURITY.md` calls data cannot run code."""

from __future__ import annotations

import json
import pickle
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tfkit
from tests.run.training.runs import PLUGINS
from tfkit.tools.compare.comparison import compare
from tfkit.tools.train.record import current_environment

SETS = ["d_model=16", "vocab_size=32", "decoder.n_layers=1", "decoder.attention.n_heads=2", "decoder.ffn.d_ff=32"]
Folder = Callable[..., Path]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    """A published model with remote code, whose import leaves a file `ran`."""

    def write(architecture: str, model_type: str) -> Path:
        folder_path = tmp_path / "published"
        tfkit.save(tfkit.build(tfkit.load("gpt2", sets=SETS)), folder_path, layout="huggingface")
        (folder_path / "spec.yaml").unlink()
        fields = json.loads((folder_path / "config.json").read_text(encoding="utf-8"))
        code = {"AutoConfig": "remote.Config", "AutoModelForCausalLM": "remote.Model"}
        fields |= {"architectures": [architecture], "model_type": model_type, "auto_map": code}
        (folder_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
        text = f"open({str(tmp_path / 'ran')!r}, 'w').close()\nclass Config: ...\nclass Model: ...\n"
        (folder_path / "remote.py").write_text(text, encoding="utf-8")
        return folder_path

    return write


def test_compare_runs_no_code_of_a_folder(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")  # transformers would ask
    with pytest.raises(tfkit.SpecError, match="transformers has no model `AutoModelForCausalLM`"):
        compare(tfkit.load("gpt2", sets=SETS), folder("AutoModelForCausalLM", "remote"))
    assert not (tmp_path / "ran").exists()


def test_compare_and_import_take_a_known_model_without_its_code(folder: Folder, tmp_path: Path) -> None:
    folder_path = folder("GPT2LMHeadModel", "gpt2")
    assert compare(tfkit.load("gpt2", sets=SETS), folder_path).equal
    assert "d_model: 16" in tfkit.import_config(folder_path).text
    assert not (tmp_path / "ran").exists()
    assert "remote" not in sys.modules


class Pickle:
    """An object that creates the file `ran` when a pickle of it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, ("ran", "w")


def test_compare_reads_no_pickle(folder: Folder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    published = folder("GPT2LMHeadModel", "gpt2")
    tfkit.save(tfkit.build(tfkit.load("gpt2", sets=SETS)), "a")
    (published / "model.safetensors").unlink()
    (published / "pytorch_model.bin").write_bytes(pickle.dumps(Pickle()))
    with pytest.raises(tfkit.SpecError, match=r"`.*published` has only pickles"):
        compare("a", published)
    assert not Path("ran").exists()


@pytest.mark.parametrize(
    "value", ["!!python/object/apply:os.mkdir [ran]", "__import__('os').mkdir('ran')", "open('ran', 'w')"]
)
def test_a_spec_runs_no_code(value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("spec.yaml").write_text(f"extends: gpt2\nname: evil\nd_model: {value}\n", encoding="utf-8")
    with pytest.raises(tfkit.SpecError):
        tfkit.load("spec.yaml")
    assert not Path("ran").exists()


@pytest.mark.parametrize("name", ["a; ran = 1", "a\nran", "print('ran')", "x.y"])
def test_names_of_nodes_are_identifiers(name: str) -> None:
    with pytest.raises(tfkit.SpecError):
        tfkit.load({"tfkit": 1, "name": "evil", "graph": {name: {"block": "embedding", "d_model": 8, "vocab_size": 8}}})


def test_training_starts_no_program_of_a_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration of a repository can name programs that git starts, some of them for nearly every command."""
    monkeypatch.chdir(tmp_path)
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'ran'))}\ncat\n", encoding="utf-8")
    program.chmod(0o755)
    Path("notes.txt").write_text("notes\n", encoding="utf-8")
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "notes.txt"], [*author, "commit", "-qm", "notes"]):
        subprocess.run(["git", *words], check=True)
    commit = subprocess.run(["git", "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout.strip()
    keys = ["core.fsmonitor", "filter.x.clean", "filter.x.smudge", "diff.x.textconv", "diff.external", "core.pager"]
    for key in keys:
        subprocess.run(["git", "config", key, str(program)], check=True)
    subprocess.run(["git", "config", "alias.rev-parse", f"!{program}"], check=True)
    Path(".gitattributes").write_text("* filter=x diff=x\n", encoding="utf-8")
    Path("notes.txt").write_text("other\n", encoding="utf-8")  # of equal length: git has to read the file
    assert current_environment(PLUGINS)["git"] == commit
    assert not Path("ran").exists()
    subprocess.run(["git", "status"], check=True, capture_output=True)
    assert Path("ran").exists(), "the planted programs never run"

"""Pickles of transformers and of any tensors: what is converted, and what is refused."""

from __future__ import annotations

import json
import pickle
import shlex
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.cli import main
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.convert import read_pickle
from tfkit.tools.convert.convert import convert

from .in_process import in_process

IN_PROCESS = pytest.mark.usefixtures(in_process.__name__)
TOKENS = torch.arange(8)[None]


def gpt2_folder(folder: Path, *, shards: int = 1) -> Any:
    """A folder of transformers with pickles, in which the tied matrices are stored twice, and its model."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 41, "n_positions": 16, "n_embd": 8, "n_layer": 2, "n_head": 2}
    theirs = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=3, eos_token_id=4)).eval()
    theirs.config.architectures = ["GPT2LMHeadModel"]
    theirs.config.save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 16}')
    state = theirs.state_dict()
    parts = [dict(list(state.items())[number::shards]) for number in range(shards)]
    names = [f"pytorch_model-{number + 1:05}-of-{shards:05}.bin" for number in range(shards)]
    names = names if shards > 1 else ["pytorch_model.bin"]
    for name, part in zip(names, parts, strict=True):
        torch.save(part, folder / name)
    if shards > 1:
        files = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": files}))
    return theirs


@IN_PROCESS
@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_of_transformers(shards: int, tmp_path: Path) -> None:
    theirs = gpt2_folder(tmp_path / "in", shards=shards)
    layout, files, _ = convert(tmp_path / "in", tmp_path / "out")
    assert layout == "transformers"
    assert [file.name for file in files] == ["tokenizer_config.json", "model.safetensors", "config.json"]
    with torch.no_grad():
        expected = theirs(TOKENS).logits
        again = type(theirs).from_pretrained(tmp_path / "out")
        imported = tfkit.import_config(tmp_path / "out")
        for logits in (again(TOKENS).logits, tfkit.build(imported.graph).eval()(TOKENS)):
            assert (logits - expected).abs().max() < 1e-5
    assert again.config.eos_token_id == 4


@IN_PROCESS
def test_any_pickle_of_tensors_keeps_their_names(tmp_path: Path) -> None:
    base = torch.arange(6.0)
    tensors = {"a": base, "b": base, "c": base[2:4], "d": base.view(2, 3).T, "e": torch.tensor(3)}
    for number, zipped in enumerate([True, False]):  # torch before 1.6 wrote no archives
        torch.save({**tensors, "note": "text"}, tmp_path / "w.pt", _use_new_zipfile_serialization=zipped)
        layout, files, _ = convert(tmp_path / "w.pt", tmp_path / f"out{number}")
        assert (layout, [file.name for file in files]) == ("tensors", ["model.safetensors"])
        stored = load_file(files[0])
        assert stored.keys() == tensors.keys()
        assert all(torch.equal(stored[name], tensor) for name, tensor in tensors.items())


class Code:
    """An object that creates the file `ran` when a pickle of it is loaded."""

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, str]]:
        return open, ("ran", "w")


def truncated(path: Path) -> None:
    torch.save({"w": torch.zeros(999)}, path)
    path.write_bytes(path.read_bytes()[:-1500])


DAMAGED: dict[str, tuple[Callable[[Path], object], str]] = {
    "code": (lambda path: path.write_bytes(pickle.dumps(Code(), 2)), "it names `io.open`, which is neither a tensor"),
    "zipped code": (lambda path: torch.save({"w": torch.ones(2), "x": Code()}, path), "it names `io.open`"),
    "truncated": (truncated, "it is damaged or truncated"),
    "empty": (lambda path: path.write_bytes(b""), "it is damaged or truncated"),
    "text": (lambda path: path.write_text("weights"), "it is damaged or truncated"),
    "no mapping": (lambda path: torch.save([torch.ones(2)], path), "it has no mapping from names to tensors"),
    "no tensors": (lambda path: torch.save({"model": {"w": 1.0}}, path), "it has no tensors"),
    "repeated": (lambda path: torch.save({"w": torch.ones(1).expand(2**40)}, path), "more than twice the size"),
    "names": (lambda path: torch.save(dict.fromkeys(map(str, range(99)), torch.ones(2**18)), path), "more than twice"),
    "sparse": (lambda path: torch.save({"w": torch.eye(2).to_sparse()}, path), "must be stored with all its values"),
}


@IN_PROCESS
@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_and_malicious_pickles_are_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write, message = DAMAGED[case]
    write(Path("pytorch_model.bin"))
    with pytest.raises(tfkit.SpecError, match=message) as caught:
        convert(Path(), Path("out"))
    assert len(caught.value.diagnostics) == 1
    assert [path.name for path in Path().iterdir()] == ["pytorch_model.bin"]


@pytest.mark.slow
def test_the_process_has_no_network_and_no_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program is run with a `torch.load` that a malicious file could call."""
    monkeypatch.chdir(tmp_path)
    theirs = gpt2_folder(Path("in"))
    assert main(["convert", "in", "-o", "out"]) == 0
    assert torch.equal(type(theirs).from_pretrained("out").lm_head.weight, theirs.lm_head.weight)
    program = Path(read_pickle.__file__).read_text(encoding="utf-8")
    attack = "def load(source):\n    import socket\n    socket.socket().connect(('127.0.0.1', PORT))\n"
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        Path("attacked.py").write_text(program.replace("def load(", f"{attack.replace('PORT', port)}\ndef _load("))
        with Isolated("attacked.py") as process:
            assert "unreachable" in process.answer(["in/pytorch_model.bin", "t"])["error"]
    filling = program.replace("def load(", "def load(source):\n    open('big', 'wb').write(bytes(2**27))\n\ndef _load(")
    Path("filling.py").write_text(filling)
    with Isolated("filling.py") as process:
        assert "File too large" in process.answer(["in/pytorch_model.bin", "t"])["error"]


@IN_PROCESS
def test_shards_must_be_complete_and_in_their_folder(tmp_path: Path) -> None:
    gpt2_folder(tmp_path / "in", shards=2)
    index = tmp_path / "in/pytorch_model.bin.index.json"
    files: dict[str, str] = json.loads(index.read_text())["weight_map"]

    def refusal(**changes: str) -> str:
        index.write_text(json.dumps({"weight_map": {**files, **changes}}))
        with pytest.raises(tfkit.SpecError) as caught:
            convert(tmp_path / "in", tmp_path / "out")
        return str(caught.value)

    first = next(iter(files.values()))
    assert "names tensor `absent`, which no file has" in refusal(absent=first)
    assert "names a file outside its folder" in refusal(absent="../other.bin")
    assert "No such file" in refusal(absent="other.bin")
    torch.save({next(iter(files)): torch.ones(2)}, tmp_path / "in" / first.replace("00001-", "00002-"))
    assert "is in two files" in refusal()


@IN_PROCESS
def test_existing_folders_are_not_replaced(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("years of work")
    with pytest.raises(tfkit.SpecError, match="must be a new folder"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert (tmp_path / "out/thesis.tex").read_text() == "years of work"


@IN_PROCESS
def test_what_is_written_is_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")

    def write_other(sizes: object, tensors: object, folder: Path, **_: object) -> None:
        save_file({"w": torch.zeros(2)}, folder / "model.safetensors")

    monkeypatch.setattr("tfkit.tools.convert.convert.write_tensors", write_other)
    with pytest.raises(tfkit.SpecError, match="was not written as it was read"):
        convert(tmp_path / "w.pt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


FILES = {
    "pytorch_model.bin": "in",
    "consolidated.00.pth": "in",
    "lit_model.pth": "in",
    "ckpt.pt": "in/ckpt.pt",
    "other.pt": "in/other.pt",
}


@IN_PROCESS
@pytest.mark.parametrize("name", FILES)
def test_the_error_of_every_command_names_the_conversion(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("in").mkdir()
    torch.save({"w": torch.ones(2)}, f"in/{name}")
    if name in ("ckpt.pt", "other.pt"):
        commands = [["build", "gpt2", "--weights", f"in/{name}"]]
    else:
        commands = [["import", "in"], ["build", "gpt2", "--weights", "in"], ["tensors", "in"]]
    for command in commands:
        assert main(command) == 1
        error = capsys.readouterr().err
        line = error[error.index("`tfkit convert") :].strip("`\n")
        assert shlex.split(line)[:3] == ["tfkit", "convert", FILES[name]], error
    if name in ("pytorch_model.bin", "other.pt"):
        assert main(shlex.split(line)[1:]) == 0
        folder = Path(shlex.split(line)[-1])
        assert (folder / "model.safetensors").is_file()
        assert main(commands[-1]) == 1
        assert f"name the folder with its tensors as safetensors: `{folder}`" in capsys.readouterr().err

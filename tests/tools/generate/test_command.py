"""`tfkit generate`: what it prints, as it comes, where it stops, and what it refuses."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import tfkit
from tfkit.cli import main
from tfkit.decoding.generate import generate
from tfkit.decoding.text import CharacterTokenizer, load_tokenizer
from tfkit.tools.params import command
from tfkit.tools.save.save import save

from ...decoding.test_text import END, byte_level

pytestmark = pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")  # sure of its tokens on purpose

SPEC = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 60
max_len: 40
dropout: 0.1
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head}
init: {kind: normal, std: 1.0}
"""
LINES = ["the quick brown fox jumps over the lazy dog", "the end, the end\nof the fox\n"]
PAIR = """\
tfkit: 1
name: pair
d_model: 16
vocab_size: 60
inputs: [source, target]
graph:
  source_embedding: {block: embedding, input: source}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2, position: t5}, ffn: {kind: relu, d_ff: 24}}
  target_embedding: {block: embedding, input: target, tie: source_embedding}
  decoder:
    {block: decoder, memory: encoder, n_layers: 1, attention: {n_heads: 2, position: t5}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head, tie: source_embedding}
init: {kind: normal, std: 0.5}
"""
ENCODER = """\
tfkit: 1
name: reader
d_model: 16
vocab_size: 60
graph:
  embedding: {block: embedding}
  encoder: {block: encoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: relu, d_ff: 24}}
  logits: {block: lm_head}
"""
WEIGHTS = ["--weights", "out/model.safetensors"]
PROMPT = [*WEIGHTS, "--prompt", "the quick"]
FEW = ["--max-new-tokens", "15"]
Golden = Callable[[str, str], None]
Run = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two models with their weights, and a tokenizer beside them."""
    made = tmp_path_factory.mktemp("models")
    for name, spec in (("small", SPEC), ("pair", PAIR), ("reader", ENCODER)):
        (made / f"{name}.yaml").write_text(spec)
    for name, out in (("small", "out"), ("pair", "pair")):
        graph = tfkit.load(made / f"{name}.yaml")
        save(tfkit.build(graph, seed=4), made / out)
        byte_level(LINES, 60).save(str(made / out / "tokenizer.json"))
    (made / "empty").mkdir()
    return made


@pytest.fixture(autouse=True)
def stand(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("TFKIT_DISABLE", raising=False)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """`run("small.yaml", ...)` gives standard output and standard error; it must end with `status`."""

    def call(*arguments: str, status: int = 0) -> tuple[str, str]:
        found = main(["generate", *arguments, "--no-plugins"])
        out, err = capsys.readouterr()
        assert found == status, err
        return out, err

    return call


@pytest.fixture
def model(folder: Path) -> torch.fx.GraphModule:
    built = tfkit.build(folder / "small.yaml")
    built.load_state_dict(load_file(folder / "out" / "model.safetensors"))
    return built.eval()


def expected(folder: Path, model: torch.fx.GraphModule, prompt: str, new: int, **given: Any) -> list[str]:
    """The texts from Python, decoded all at once."""
    tokenizer = load_tokenizer(folder / "out" / "tokenizer.json")
    found = generate(model, [tokenizer.encode(prompt)], max_new_tokens=new, **given)
    return [tokenizer.decode(row) for row in found.rows()]


# ---- what it prints ----


def test_it_prints_what_python_gives(run: Run, folder: Path, model: torch.fx.GraphModule) -> None:
    out, err = run("small.yaml", *PROMPT, "--max-new-tokens", "20")
    assert out == expected(folder, model, "the quick", 20)[0] + "\n"
    assert len(set(out)) > 10
    assert re.fullmatch(r"20 tokens in \d+\.\d\d s, \d+\.\d tokens/s\n", err)


def test_sampling_options_arrive(run: Run, folder: Path, model: torch.fx.GraphModule) -> None:
    given = {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 3}
    options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    found = json.loads(run("small.yaml", *PROMPT, "--max-new-tokens", "15", "--samples", "2", "--json", *options)[0])
    texts = expected(folder, model, "the quick", 15, n_samples=2, **given)
    assert [one["text"] for one in found["texts"]] == texts
    assert len(set(texts)) == 2


def test_what_is_printed_comes_token_by_token(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, model: torch.fx.GraphModule
) -> None:
    pieces: list[str] = []
    echo = command.click.echo
    monkeypatch.setattr("click.echo", lambda text="", **given: (pieces.append(text), echo(text, **given)))
    out, _ = run("small.yaml", *PROMPT, "--max-new-tokens", "20")
    tokenizer = load_tokenizer(folder / "out" / "tokenizer.json")
    ids = generate(model, [tokenizer.encode("the quick")], max_new_tokens=20).rows()[0]
    assert len([piece for piece in pieces if piece]) > 12
    assert out.startswith("".join(pieces[:8]))
    assert pieces[0] == tokenizer.decode(ids[:1])


def test_several_texts_stand_one_below_the_other(run: Run) -> None:
    arguments = ["small.yaml", *PROMPT, "--prompt", "a\nb", "--samples", "2", "--temperature", "1", "--stop", "e"]
    out = run(*arguments)[0]
    found = json.loads(run(*arguments, "--json")[0])["texts"]
    heads = [
        "── `the quick`, sample 1 of 2 ──",
        "── `the quick`, sample 2 of 2 ──",
        "── `a\\nb`, sample 1 of 2 ──",
        "── `a\\nb`, sample 2 of 2 ──",
    ]
    assert out == "\n".join(f"{head}\n{one['text']}\n" for head, one in zip(heads, found, strict=True))
    assert [(one["prompt"], one["sample"]) for one in found] == [
        ("the quick", 1),
        ("the quick", 2),
        ("a\nb", 1),
        ("a\nb", 2),
    ]
    assert not any("e" in one["text"] for one in found)


def test_json(run: Run) -> None:
    out, err = run("small.yaml", *PROMPT, "--json")
    assert err == ""
    found = json.loads(out)
    assert set(found) == {"texts", "seconds", "tokens_per_second"}
    (one,) = found["texts"]
    assert set(one) == {"prompt", "sample", "text", "tokens", "ended"}
    prompt = len(load_tokenizer(Path("out/tokenizer.json")).encode("the quick"))
    assert len(one["tokens"]) == 40 - prompt, "as many as fit, below 100"


def test_prompts_from_files_and_standard_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--max-new-tokens", "5"]
    said = run("small.yaml", *PROMPT, *few)[0]
    (tmp_path / "prompt.txt").write_text("the quick\n")
    assert run("small.yaml", *WEIGHTS, "--prompt-file", str(tmp_path / "prompt.txt"), *few)[0] == said
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick\r\n")))
    assert run("small.yaml", *WEIGHTS, "--prompt", "-", *few)[0] == said


def test_token_ids(run: Run, model: torch.fx.GraphModule) -> None:
    ids = generate(model, [[5, 6, 7]], max_new_tokens=9).rows()[0]
    arguments = ["small.yaml", *WEIGHTS, "--tokens", "5,6,7", "--max-new-tokens", "9"]
    assert run(*arguments)[0] == ", ".join(map(str, ids)) + "\n"
    stopped = json.loads(run(*arguments, "--stop", str(ids[4]), "--json")[0])["texts"][0]
    assert stopped["tokens"] == ids[: ids.index(ids[4]) + 1]
    assert stopped["ended"] == "stop"


def test_a_character_tokenizer(run: Run, tmp_path: Path) -> None:
    CharacterTokenizer.of_text("abc ").save(tmp_path / "chars.json")
    (tmp_path / "abc.txt").write_text("a c b")
    few = [*WEIGHTS, "--max-new-tokens", "3", "--prompt", "ab", "--tokenizer"]
    said = run("small.yaml", *few, str(tmp_path / "chars.json"))[0]
    assert run("small.yaml", *few, str(tmp_path / "abc.txt"))[0] == said


def test_random_weights_say_so(run: Run) -> None:
    arguments = ["small.yaml", "--tokenizer", "out/tokenizer.json", "--prompt", "the", "--seed", "4"]
    out, err = run(*arguments)
    assert err.splitlines()[0] == "warning: without --weights the model is random, and so is its text"
    assert out == run("small.yaml", *WEIGHTS, "--prompt", "the")[0], "saved with the same seed"


def test_the_encoder_reads_the_prompt(run: Run, folder: Path) -> None:
    built = tfkit.build("pair.yaml")
    built.load_state_dict(load_file("pair/model.safetensors"))
    tokenizer = load_tokenizer(folder / "pair" / "tokenizer.json")
    start = tokenizer.special(END)
    assert start is not None
    arguments = ["pair.yaml", "--weights", "pair/model.safetensors", "--max-new-tokens", "12"]
    texts = []
    for prompt in ("the quick", "over"):
        found = generate(built, [[start]], max_new_tokens=12, source=[tokenizer.encode(prompt)])
        texts.append(tokenizer.decode(found.rows()[0]))
        for name in (END, str(start)):
            assert run(*arguments, "--prompt", prompt, "--start", name)[0] == texts[-1] + "\n"
    assert texts[0] != texts[1]


def test_what_the_output_cannot_show(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.TextIOWrapper):
        def isatty(self) -> bool:
            return True

    characters = "\x1béa"
    CharacterTokenizer(characters).save(tmp_path / "chars.json")
    (tmp_path / "s.yaml").write_text(SPEC.replace("60", "3"))
    arguments = [str(tmp_path / "s.yaml"), "--tokenizer", str(tmp_path / "chars.json"), "--prompt", "a"]
    arguments += ["--temperature", "9", "--max-new-tokens", "30"]
    text = json.loads(run(*arguments, "--json")[0])["texts"][0]["text"]
    assert set(text) == set(characters)
    for kind, shown in ((Terminal, text.replace("\x1b", "\\x1b")), (io.TextIOWrapper, text)):
        stream = kind(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["generate", *arguments, "--no-plugins"]) == 0
        monkeypatch.undo()
        assert stream.buffer.getvalue().decode() == shown.replace("é", "?") + "\n"  # type: ignore[attr-defined]


# ---- where it stops ----


def free(run: Run) -> dict[str, Any]:
    return json.loads(run("small.yaml", *PROMPT, "--json")[0])["texts"][0]  # type: ignore[no-any-return]


def test_it_stops_at_a_text(run: Run) -> None:
    text = free(run)["text"]
    stop = text[10:14]
    out, err = run("small.yaml", *PROMPT, "--stop", "never", "--stop", stop)
    assert out == text[: text.index(stop)] + "\n"
    assert int(err.split()[0]) < len(free(run)["tokens"])


def test_it_stops_at_a_special_token(run: Run, folder: Path) -> None:
    tokenizer = load_tokenizer(folder / "out" / "tokenizer.json")
    end = tokenizer.special(END)
    assert end is not None
    for seed in range(100):
        arguments = ["small.yaml", *PROMPT, "--temperature", "5", "--seed", str(seed)]
        tokens = json.loads(run(*arguments, "--json")[0])["texts"][0]["tokens"]
        if end in tokens[5:] and end not in tokens[:5]:
            break
    said = tokens[: tokens.index(end)]
    out, err = run(*arguments, "--stop", END)
    assert out == tokenizer.decode(said) + "\n"
    assert END not in out
    assert int(err.split()[0]) == len(said) + 1
    assert run(*arguments)[0].startswith(out.rstrip("\n")), "without --stop it goes on"


# ---- in a process of its own ----

SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import tfkit.decoding.sampling as sampling
choose = sampling.Sampler.__call__
def slowly(self, logits):
    time.sleep(0.1)
    return choose(self, logits)
sampling.Sampler.__call__ = slowly
from tfkit.cli import main
sys.exit(main())
"""


@pytest.fixture
def slow(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A model that takes a tenth of a second for each token."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tfkit.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "generate", "small.yaml", *PROMPT, *FEW],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_it_streams(slow: subprocess.Popen[bytes], run: Run) -> None:
    assert slow.stdout is not None
    seen = []
    while piece := os.read(slow.stdout.fileno(), 1000):
        seen.append((time.monotonic(), piece))
    assert b"".join(piece for _, piece in seen).decode() == run("small.yaml", *PROMPT, *FEW)[0]
    assert len(seen) > 8
    assert seen[-1][0] - seen[0][0] > 1


@pytest.mark.slow
def test_interrupt(slow: subprocess.Popen[bytes]) -> None:
    assert slow.stdout is not None
    first = os.read(slow.stdout.fileno(), 1000)
    slow.send_signal(signal.SIGINT)
    out, err = slow.communicate(timeout=30)
    assert slow.returncode == 130
    assert err == b"interrupted\n"
    assert (first + out).endswith(b"\n")


@pytest.mark.slow
def test_broken_pipe(slow: subprocess.Popen[bytes]) -> None:
    assert slow.stdout is not None
    os.read(slow.stdout.fileno(), 1)
    slow.stdout.close()
    assert slow.wait(timeout=30) == 128 + signal.SIGPIPE
    assert slow.stderr is not None
    assert slow.stderr.read() == b""


# ---- what it refuses ----


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("nothing", []),
        ("tokens_and_prompt", ["--tokens", "1", "--prompt", "a"]),
        ("two_standard_inputs", ["--prompt", "-", "--prompt", "-"]),
        ("empty_stop", ["--prompt", "a", "--stop", ""]),
        ("top_k_alone", ["--prompt", "a", "--top-k", "3"]),
        ("samples_alone", ["--prompt", "a", "--samples", "3"]),
        ("top_p_range", ["--prompt", "a", "--top-p", "1.5"]),
        ("start_without_encoder", [*PROMPT, "--start", "3"]),
        ("on_meta", [*PROMPT, "--device", "meta"]),
    ],
)
def test_wrong_usage(run: Run, golden: Golden, name: str, arguments: list[str]) -> None:
    out, err = run("small.yaml", *arguments, status=2)
    assert out == ""
    golden(f"generate/usage_{name}", err)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("no_tokenizer", ["small.yaml", "--prompt", "a"]),
        ("no_tokenizer_beside", ["small.yaml", "--weights", "small.yaml", "--prompt", "a"]),
        ("tokenizer_missing", ["small.yaml", "--tokenizer", "nowhere.json", "--prompt", "a"]),
        ("vocabulary", ["small.yaml", *PROMPT, "--set", "vocab_size=50"]),
        ("prompt_empty", ["small.yaml", *PROMPT, "--prompt", ""]),
        ("prompt_long", ["small.yaml", *WEIGHTS, "--prompt", "the quick " * 30]),
        ("no_room", ["small.yaml", *PROMPT, "--max-new-tokens", "60"]),
        ("prompt_file_missing", ["small.yaml", *WEIGHTS, "--prompt-file", "nowhere.txt"]),
        ("unknown_character", ["small.yaml", "--tokenizer", "small.yaml", "--prompt", "öz"]),
        ("no_id", ["small.yaml", *WEIGHTS, "--tokens", "1,two"]),
        ("id_beyond", ["small.yaml", *WEIGHTS, "--tokens", "1,60"]),
        ("encoder", ["reader.yaml", "--tokens", "1"]),
        ("no_start", ["pair.yaml", "--tokens", "1"]),
        ("start_unknown", ["pair.yaml", "--weights", "pair/model.safetensors", "--prompt", "a", "--start", "<s>"]),
        ("weights_missing", ["small.yaml", "--weights", "out/nowhere.safetensors", "--prompt", "a"]),
        ("weights_folder", ["small.yaml", "--weights", "empty", "--tokens", "1"]),
        ("weights_of_another", ["small.yaml", "--weights", "pair/model.safetensors", "--prompt", "a"]),
        ("weights_of_other_sizes", ["small.yaml", *PROMPT, "--set", "decoder.n_layers=3", "--set", "max_len=50"]),
    ],
)
def test_wrong_input(run: Run, golden: Golden, name: str, arguments: list[str]) -> None:
    out, err = run(*arguments, status=1)
    assert out == ""
    golden(f"generate/{name}", "".join(f"{line}\n" for line in err.splitlines() if not line.startswith("warning: ")))
    assert json.loads(run(*arguments, "--json", status=1)[0])["errors"]


def test_not_utf8(run: Run, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    err = run("small.yaml", *WEIGHTS, "--prompt-file", str(tmp_path / "latin.txt"), status=1)[1]
    assert err.endswith(": it is not UTF-8\n")


def test_logits_that_are_no_numbers(run: Run, tmp_path: Path) -> None:
    weights = {name: tensor * 1e36 for name, tensor in load_file("out/model.safetensors").items()}
    save_file(weights, tmp_path / "w.safetensors")
    err = run("small.yaml", "--weights", str(tmp_path / "w.safetensors"), "--tokens", "1", status=1)[1]
    assert err == "error: the model's logits are NaN, in torch.float32: its weights are broken, or too large for it\n"

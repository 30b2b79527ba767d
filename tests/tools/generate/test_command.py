"""`tfkit generate`: its streamed output, its end, and its errors."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import tfkit
from tfkit.cli import main
from tfkit.decoding.generate import generate
from tfkit.decoding.text import CharacterTokenizer, load_tokenizer
from tfkit.tools.params import command

from ...decoding.test_text import END
from .conftest import PROMPT, SPEC, WEIGHTS, Run, expected

pytestmark = pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")  # sure of its tokens on purpose


def test_it_prints_what_python_gives(run: Run, folder: Path, model: torch.fx.GraphModule) -> None:
    out, err = run("small.yaml", *PROMPT, "--max-new-tokens", "20")
    assert out == expected(folder, model, "the quick", 20)[0] + "\n"
    assert len(set(out)) > 10
    assert re.fullmatch(r"20 tokens in \d+\.\d\d s, \d+\.\d tokens/s\n", err)


def test_sampling_options_arrive(run: Run, folder: Path, model: torch.fx.GraphModule) -> None:
    arguments = {"temperature": 1.5, "top_k": 40, "top_p": 0.8, "repetition_penalty": 1.2, "seed": 3}
    options = [part for name, value in arguments.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    report = json.loads(run("small.yaml", *PROMPT, "--max-new-tokens", "15", "--samples", "2", "--json", *options)[0])
    texts = expected(folder, model, "the quick", 15, n_samples=2, **arguments)
    assert [text["text"] for text in report["texts"]] == texts
    assert len(set(texts)) == 2


def test_what_is_printed_comes_token_by_token(
    run: Run, monkeypatch: pytest.MonkeyPatch, folder: Path, model: torch.fx.GraphModule
) -> None:
    parts: list[str] = []
    echo = command.click.echo
    monkeypatch.setattr("click.echo", lambda text="", **options: (parts.append(text), echo(text, **options)))
    out, _ = run("small.yaml", *PROMPT, "--max-new-tokens", "20")
    tokenizer = load_tokenizer(folder / "out" / "tokenizer.json")
    ids = generate(model, [tokenizer.encode("the quick")], max_new_tokens=20).rows()[0]
    assert len([piece for piece in parts if piece]) > 12
    assert out.startswith("".join(parts[:8]))
    assert parts[0] == tokenizer.decode(ids[:1])


def test_several_texts_stand_one_below_the_other(run: Run) -> None:
    arguments = ["small.yaml", *PROMPT, "--prompt", "a\nb", "--samples", "2", "--temperature", "1", "--stop", "e"]
    out = run(*arguments)[0]
    report = json.loads(run(*arguments, "--json")[0])["texts"]
    heads = [
        "── `the quick`, sample 1 of 2 ──",
        "── `the quick`, sample 2 of 2 ──",
        "── `a\\nb`, sample 1 of 2 ──",
        "── `a\\nb`, sample 2 of 2 ──",
    ]
    assert out == "\n".join(f"{head}\n{sample['text']}\n" for head, sample in zip(heads, report, strict=True))
    assert [(sample["prompt"], sample["sample"]) for sample in report] == [
        ("the quick", 1),
        ("the quick", 2),
        ("a\nb", 1),
        ("a\nb", 2),
    ]
    assert not any("e" in sample["text"] for sample in report)


def test_json(run: Run) -> None:
    out, err = run("small.yaml", *PROMPT, "--json")
    assert err == ""
    report = json.loads(out)
    assert set(report) == {"texts", "forwards", "seconds", "tokens_per_second"}
    (sample,) = report["texts"]
    assert set(sample) == {"prompt", "sample", "text", "tokens", "ended"}
    prompt = len(load_tokenizer(Path("out/tokenizer.json")).encode("the quick"))
    assert len(sample["tokens"]) == 40 - prompt, "as many as fit, below 100"


def test_prompts_from_files_and_standard_input(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = ["--max-new-tokens", "5"]
    text = run("small.yaml", *PROMPT, *few)[0]
    (tmp_path / "prompt.txt").write_text("the quick\n")
    assert run("small.yaml", *WEIGHTS, "--prompt-file", str(tmp_path / "prompt.txt"), *few)[0] == text
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the quick\r\n")))
    assert run("small.yaml", *WEIGHTS, "--prompt", "-", *few)[0] == text


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
    metadata = run("small.yaml", *few, str(tmp_path / "chars.json"))[0]
    assert run("small.yaml", *few, str(tmp_path / "abc.txt"))[0] == metadata


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
        actual = generate(built, [[start]], max_new_tokens=12, source=[tokenizer.encode(prompt)])
        texts.append(tokenizer.decode(actual.rows()[0]))
        for name in (END, str(start)):
            assert run(*arguments, "--prompt", prompt, "--start", name)[0] == texts[-1] + "\n"
    assert texts[0] != texts[1]


def test_masks_are_filled_in(run: Run, folder: Path) -> None:
    built, tokenizer = tfkit.build("reader", weights="reader"), load_tokenizer(folder / "reader" / "tokenizer.json")
    arguments = ["reader", "--prompt", "the quick", "--prompt", "over", "--max-new-tokens", "11", "--json"]
    prompts = [tokenizer.encode(prompt) for prompt in ("the quick", "over")]

    def check(*options: str, temperature: float = 0.0, n_samples: int = 1, **settings: Any) -> None:
        report = json.loads(run(*arguments, *options)[0])
        way = tfkit.MaskedDiffusion(**{"mask_token": 58, **settings})
        result = generate(
            built, prompts, max_new_tokens=11, temperature=temperature, n_samples=n_samples, seed=3, generation=way
        )
        assert [text["tokens"] for text in report["texts"]] == result.rows()
        assert report["forwards"] == result.forwards

    check()
    check("--mask-token", "40", mask_token=40)
    check("--steps", "5", "--block-length", "4", steps=5, block_length=4)
    check("--remasking", "random", "--samples", "2", "--seed", "3", n_samples=2, remasking="random")
    check("--temperature", "2", "--seed", "3", temperature=2.0)
    err = run(*arguments[:-1], "--steps", "5")[1]
    assert re.fullmatch(r"22 tokens in \d+\.\d\d s, \d+\.\d tokens/s, 5 forwards\n", err)


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
    for kind, printed in ((Terminal, text.replace("\x1b", "\\x1b")), (io.TextIOWrapper, text)):
        stream = kind(io.BytesIO(), encoding="ascii")
        monkeypatch.setattr("sys.stdout", stream)
        assert main(["generate", *arguments, "--no-plugins"]) == 0
        monkeypatch.undo()
        assert stream.buffer.getvalue().decode() == printed.replace("é", "?") + "\n"  # type: ignore[attr-defined]


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
    text = tokens[: tokens.index(end)]
    out, err = run(*arguments, "--stop", END)
    assert out == tokenizer.decode(text) + "\n"
    assert END not in out
    assert int(err.split()[0]) == len(text) + 1
    assert run(*arguments)[0].startswith(out.rstrip("\n")), "without --stop it goes on"


def test_it_stops_at_the_end_that_the_weights_define(run: Run, folder: Path, model: torch.fx.GraphModule) -> None:
    ids = generate(model, [[5, 6, 7]], max_new_tokens=9).rows()[0]
    arguments = ["small.yaml", *WEIGHTS, "--tokens", "5,6,7", "--max-new-tokens", "9", "--json"]
    config = folder / "out" / "generation_config.json"
    config.write_text(json.dumps({"eos_token_id": [ids[4], 999]}))
    try:
        text = json.loads(run(*arguments)[0])["texts"][0]
        assert (text["tokens"], text["ended"]) == (ids[: ids.index(ids[4]) + 1], "stop")
        assert json.loads(run(*arguments, "--stop", "999")[0])["texts"][0]["tokens"] == ids
    finally:
        config.unlink()  # all tests of the session share the folder

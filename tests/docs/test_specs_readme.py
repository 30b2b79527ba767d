"""The how-to of specs/README.md: its files are written, and its commands print the documented output."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import transformers

from tfkit.cli import main

from ..known import KNOWN

TEXT = (Path(__file__).parents[2] / "specs" / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, flags=re.MULTILINE | re.DOTALL)
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 24}
JAIS2 = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def download(model_type: str, **fields: int) -> None:
    """What the reader has: the folder of a model, here a small one with random weights, norms and biases too."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(model_type, **fields, bos_token_id=0, eos_token_id=1)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0, 0.2)
    model.save_pretrained(f"downloads/{model_type}")


def matches(expected: str, printed: str) -> bool:
    """Whether a text is what the page shows: a line of `...` stands for any lines, and ` ...` for the rest of one."""
    lines = [re.escape(line) for line in expected.strip().splitlines()]
    pattern = "\n".join("ANY" if line == re.escape("...") else line for line in lines)
    pattern = pattern.replace("\nANY\n", r"\n(?:.*\n)*?").replace("ANY\n", r"(?:.*\n)*?").replace("\nANY", r"(?:\n.*)*")
    pattern = pattern.replace(re.escape(" ..."), " .*")
    rounding = re.compile(r"\d\\\.\de(?:\\-|\+)\d\d$", re.MULTILINE)  # is not the page's business
    pattern = rounding.sub(lambda _: r"\d\.\de[-+]\d\d", pattern)
    return re.fullmatch(pattern, printed.strip()) is not None


@pytest.mark.slow
def test_the_how_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")
    transformers.utils.logging.disable_progress_bar()
    download("gpt2", **GPT2)
    download("jais2", **JAIS2)
    for language, text in BLOCKS:
        if language == "yaml":
            name = text.partition("\n")[0].removeprefix("# ")
            Path(name).parent.mkdir(exist_ok=True)
            Path(name).write_text(text, encoding="utf-8")
            continue
        assert language == "console", "a block is a file, or commands and what they print"
        commands = re.split(r"^\$ (.*)\n", text, flags=re.MULTILINE)
        for command, expected in zip(commands[1::2], commands[2::2], strict=True):
            main(shlex.split(command)[1:])
            out, err = capsys.readouterr()
            assert matches(expected, "\n".join(filter(None, (err.strip(), out.strip())))), f"{command}\n{err}{out}"


@pytest.mark.parametrize("printed", ["a\nx\ny\nb 3.1", "a\nb 3.1"])
def test_what_matches(printed: str) -> None:
    assert matches("a\n...\nb ...", printed)
    assert not matches("a\nb ...\nc", printed)
    assert not matches("a", printed)


def test_what_is_said_to_be_missing_is_missing() -> None:
    rows = [line for line in TEXT.partition("## Not yet")[2].splitlines() if line.startswith("| `")]
    named = {name for row in rows for name in re.findall(r"`([\w-]+)`", row.split("|")[1])}
    assert len(named) > 10
    assert not named & KNOWN.by_model_type.keys()
    assert named <= set(transformers.models.auto.configuration_auto.CONFIG_MAPPING)

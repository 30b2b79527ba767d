"""The README is true: its specs build, its commands print what it says, its table is what transformers has."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
from tfkit_mla import LatentAttentionConfig
from transformers import AutoConfig

import tfkit
from tfkit.cli import main

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"(?:^`(?P<file>[\w./]+)`\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL)
BLOCKS = [match.groupdict() for match in BLOCK.finditer(TEXT)]
FILES = {block["file"]: block["text"] for block in BLOCKS if block["file"]}


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2
    assert FILES.keys() == {"latent.yaml", "grouped.yaml", "indexed.yaml", "differential.yaml"}
    assert {block["language"] for block in BLOCKS if block["file"] is None} == {"console"}


def test_the_spec_builds_and_runs() -> None:
    plugins = tfkit.load_plugins(plugin_dirs=[ROOT], entry_points=False)
    sets = ["d_model=32", "vocab_size=100", "decoder.n_layers=2", "decoder.ffn.d_ff=24"]
    model = tfkit.build(tfkit.loads(FILES["latent.yaml"], plugins=plugins, sets=sets))
    assert model(torch.randint(100, (2, 7))).shape == (2, 7, 100)


def sessions() -> list[tuple[str, str]]:
    """Commands of tfkit, and what they print."""
    parts = [
        re.split(r"^\$ (.*)\n", block["text"], flags=re.MULTILINE) for block in BLOCKS if block["language"] == "console"
    ]
    (installation, _), *pairs = [
        (command, output) for part in parts for command, output in zip(part[1::2], part[2::2], strict=True)
    ]
    assert installation == "pip install --editable ."
    return pairs


@pytest.mark.parametrize(("command", "output"), sessions(), ids=lambda text: text[:60])
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed


def table(header: str) -> list[list[str]]:
    """The cells of the rows below a header that begins so."""
    rows = TEXT[TEXT.index(f"| {header} |") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in rows if not row.startswith("|---")]


def test_every_field_of_the_table_exists() -> None:
    names = [cell.strip("`") for cell in table("model")[0][2:8]]
    assert set(names) <= LatentAttentionConfig.model_fields.keys()


WORDS = ("num_attention_heads", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


PUBLISHED = [row for row in table("model")[1:] if row[1] != "deepseek_v2"]  # whose defaults are of no published size


@pytest.mark.parametrize("row", PUBLISHED, ids=lambda row: row[0])
def test_the_table_has_what_the_defaults_of_transformers_are(row: list[str]) -> None:
    config = AutoConfig.for_model(row[1])
    assert [getattr(config, word) for word in WORDS] == [None if cell == "null" else int(cell) for cell in row[2:8]]

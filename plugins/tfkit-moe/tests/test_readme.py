"""The README is true: its spec builds, its commands print what it says, its table of models is read."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import torch
import yaml

import tfkit
from tfkit.cli import main

from .layer import PLUGINS, spec

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(yaml|console)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
SPECS = {match[1]: text for _, text in BLOCKS if (match := re.search(r"^name: (\w+)$", text, re.MULTILINE))}
MODELS = dict(re.findall(r"^\| (.+?) \| `(\{n_experts.*\})` \|$", TEXT, re.MULTILINE))


def test_no_block_is_left_unread() -> None:
    assert len(BLOCKS) == TEXT.count("```") / 2
    assert len(MODELS) == TEXT.count("| `{")


@pytest.mark.parametrize("name", SPECS)
def test_the_specs_build_and_run(name: str) -> None:
    sets = ["d_model=64", "vocab_size=50", "decoder.n_layers=3"]
    model = tfkit.build(tfkit.loads(SPECS[name], sets=sets, plugins=PLUGINS))
    assert model(torch.randint(50, (2, 7))).shape == (2, 7, 50)


@pytest.mark.parametrize("name", MODELS)
def test_the_fields_of_published_models_are_accepted(name: str) -> None:
    fields = {"bias": False, **yaml.safe_load(re.sub(r"\b1e-20", "1.0e-20", MODELS[name]))}
    model = tfkit.build(tfkit.loads(spec(d_model=64, **fields), plugins=PLUGINS), device="meta")
    ffn = model.get_submodule("encoder.layers.0.ffn.experts")
    assert ffn.down.weight.shape == (fields["n_experts"], 64, fields["d_ff"])


@pytest.mark.parametrize(
    ("command", "output"), re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", dict(BLOCKS)["console"], re.MULTILINE)
)
def test_commands_print_what_is_shown(
    command: str, output: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    Path("small_moe.yaml").write_text(SPECS["small_moe"], encoding="utf-8")
    program, *arguments = shlex.split(command)
    assert program == "tfkit"
    status = main([*arguments, "--plugin-dir", str(ROOT), "--no-plugins"])
    captured = capsys.readouterr()
    assert status == int(output.startswith("error:"))
    pattern = re.escape(output.rstrip("\n")).replace(r"\.\.\.", "(?:.*)")
    printed = "\n".join(line.rstrip() for line in (captured.out + captured.err).splitlines())
    assert re.fullmatch(f"{pattern}\n*", printed, re.DOTALL), printed

"""Models of the specs of this plugin against its formulas, which compute each token after the other."""

from __future__ import annotations

from pathlib import Path

import pytest

from tfkit.cli import main

PLUGINS = [str(Path(__file__).parents[2] / name) for name in ("tfkit-recurrent", "tfkit-moe", "tfkit-mla")]
QUICK_SPECS = ("mamba2_130m", "recurrentgemma_2b")
SPECS = (
    "falcon_h1_0_5b",
    "kimi_linear_48b_a3b",
    "lfm2_1_2b",
    "lfm3_1_7b",
    "ling3_flash",
    "mamba_130m",
    "minimax_text_01",
    "olmo_hybrid_7b",
    "qwen3_5_27b",
    "rwkv4_169m",
    "xlstm_7b",
)


@pytest.mark.parametrize("name", [*QUICK_SPECS, *(pytest.param(name, marks=pytest.mark.slow) for name in SPECS)])
def test_a_mixer_is_its_formula(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folders = [word for plugin in PLUGINS for word in ("--plugin-dir", plugin)]
    assert main(["check", name, "--only", "meaning", "--no-plugins", *folders]) == 0
    assert "1 ok" in capsys.readouterr().out

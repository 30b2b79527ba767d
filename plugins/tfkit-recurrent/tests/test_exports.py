"""Every mixer as TorchScript that decodes, and in an ejected file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tfkit
from tfkit.testing import check_model

from .mixers import PLUGINS
from .test_mixers import SMALL_MIXERS, model_of


@pytest.mark.slow
def test_a_chunked_mixer_is_scripted() -> None:
    check_model(model_of("gated_delta").meta["graph"], plugins=PLUGINS, only=["script"])


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MIXERS)
def test_scripted_model_decodes(name: str, tmp_path: Path) -> None:
    exported = tfkit.export(model_of(name), tmp_path / "model.ts", plugins=PLUGINS)
    assert exported.difference <= 1e-5
    assert sum("by cached decoding" in check.case for check in exported.checks) == 3


@pytest.mark.parametrize("name", sorted({*SMALL_MIXERS} - {"short_conv", "channel_mix"}))
def test_a_loop_fixes_the_length_of_a_program(name: str, tmp_path: Path) -> None:
    """A program of `torch.export` has any length, or there is none: the mixer is named."""
    with pytest.raises(tfkit.SpecError, match=f"mixer `{name.split()[0]}` cannot be exported by torch.export"):
        tfkit.export(model_of(name), tmp_path / "model.pt2", plugins=PLUGINS)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["short_conv", "channel_mix"])
def test_kinds_without_a_loop_are_exported(name: str, tmp_path: Path) -> None:
    assert tfkit.export(model_of(name), tmp_path / "model.pt2", plugins=PLUGINS).difference <= 1e-5


@pytest.mark.slow
def test_a_comment_names_the_length_that_a_chunked_mixer_reads() -> None:
    text = tfkit.eject(model_of("mamba").meta["graph"])
    assert "x, gate = self.input(x).chunk(2, dim=-1)  # [b, t, 48]" in text
    assert "state = torch.addcmul(addend, factor, state)  # [b, 48, 6]" in text
    assert not re.search(r"# .*\b(10\d\d|\d{5,})\b", text)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL_MIXERS)
def test_ejected_file_runs_alone(name: str) -> None:
    check_model(model_of(name).meta["graph"], plugins=PLUGINS, level="full", only=["eject"])

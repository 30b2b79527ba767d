"""Packages of AOTInductor: equal to their models, with the weights stored once. The C++ compiler is slow."""

from __future__ import annotations

from pathlib import Path

import pytest

import tfkit
from tfkit.tools.export.export import check_format, export
from tfkit.tools.export.pt2 import Aoti
from tfkit.torch_private import programs

from ...small_specs import reduced
from .odd import one_layer

NAMES = ("gpt_oss_20b", "t5_small")
"""Experts, a window and sinks; encoder and decoder. What is compiled are the programs of `test_pt2.py`."""


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_spec(name: str, tmp_path: Path) -> None:
    assert export(tfkit.build(reduced(name, layers=1)), tmp_path / "model.pt2", format="aoti").difference <= 1e-5


@pytest.mark.slow
def test_the_weights_are_in_it_once(tmp_path: Path) -> None:
    model = one_layer(vocab_size=100_000)
    exported = export(model, tmp_path / "model.pt2", format="aoti")
    assert exported.bytes < sum(tensor.nbytes for tensor in model.state_dict().values()) + 6_000_000


def test_without_a_compiler_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.exc import InvalidCxxCompiler

    def missing() -> str:
        raise InvalidCxxCompiler

    monkeypatch.setattr(programs, "private_name", lambda name, feature: missing)
    with pytest.raises(tfkit.SpecError, match="AOTInductor needs a C\\+\\+ compiler, but there is none"):
        check_format(one_layer(block="encoder").meta["graph"], Aoti())


@pytest.mark.slow
def test_a_difference_is_caught_and_named(tmp_path: Path) -> None:
    expected = r"the aoti file differs from `small`: the first component that differs is FFN `stack\.layers\.0\.ffn`"
    with pytest.raises(tfkit.SpecError, match=expected):
        export(one_layer("sly", block="encoder"), tmp_path / "model.pt2", format="aoti")
    assert list(tmp_path.iterdir()) == []

"""Archives of several programs: they contain what torch writes, and store shared weights once."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from tfkit.torch_private import programs


class Scaled(nn.Module):
    def __init__(self, layer: nn.Linear, factor: float) -> None:
        super().__init__()
        self.layer, self.factor = layer, factor

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.factor * torch.softmax(self.layer(x) + y, dim=-1)


pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own use of it
LAYER = nn.Linear(64, 64)
FACTORS = {"once": 1.0, "twice": 2.0}


def exported_programs() -> dict[str, ExportedProgram]:
    options = {"x": torch.randn(3, 64), "y": torch.randn(3, 64)}
    free = {name: {0: Dim.DYNAMIC} for name in options}
    return {
        name: torch.export.export(Scaled(LAYER, factor), (), options, dynamic_shapes=free, strict=False)
        for name, factor in FACTORS.items()
    }


def check(path: Path, actual: Tensor, factor: float, x: Tensor, y: Tensor) -> None:
    torch.testing.assert_close(actual, Scaled(LAYER, factor)(x, y))
    with zipfile.ZipFile(path) as archive:
        assert archive.read(next(value for value in archive.namelist() if value.endswith("extra/note"))) == b"of ours"
        weights = [value for value in archive.infolist() if value.file_size >= LAYER.weight.nbytes]
        assert len([value for value in weights if "weights/" in value.filename]) == 1


def test_an_archive_of_programs(tmp_path: Path) -> None:
    path, x, y = tmp_path / "two.pt2", torch.randn(5, 64), torch.randn(5, 64)
    programs.write_programs(path, exported_programs(), {"note": "of ours"})
    for name, program in programs.read_programs(path).items():
        assert programs.arguments_of(program) == ["x", "y"]
        check(path, program.module()(x=x, y=y), FACTORS[name], x, y)


def test_a_program_in_smaller_operations() -> None:
    program = exported_programs()["once"]
    before, after = (
        {str(node.target) for node in value.graph.nodes} for value in (program, programs.decomposed_program(program))
    )
    assert "aten.add.Tensor" in before
    assert "aten.add.Tensor" not in after
    assert "prims.add.default" in after


def test_a_compiler_is_found_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert programs.has_compiler() == any(map(shutil.which, ("g++", "clang++", "c++")))

"""The best rates of `tools/transfer.py`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import transfer


def test_the_best_rate_of_each_width_has_a_star() -> None:
    losses = {(width, at): 3.0 + abs(at + 7 + width // 64) for width in (32, 64) for at in transfer.EXPONENTS}
    assert transfer.best_exponents(losses, (32, 64)) == [-7, -8]
    stars = [line.split()[1:] for line in transfer.table_of(losses, (32, 64))[1:]]
    assert [[cell.endswith("*") for cell in cells].index(True) for cells in stars] == [3, 2]


@pytest.mark.slow
def test_a_run_has_a_loss_and_its_folder_is_read_again(tmp_path: Path) -> None:
    run = transfer.run_of("mup", 64, -7, 0, base=32, steps=10)
    loss = transfer.final_loss(run, tmp_path / "run")
    assert 2 < loss < 6
    assert transfer.final_loss(run, tmp_path / "run") == loss

"""The command `diff`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

Golden = Callable[[str, str], None]
PUBLISHED = Path(__file__).parents[2] / "published" / "gpt2.json"
pytestmark = pytest.mark.usefixtures("specs")


def test_diff(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/diff", run("diff", "tiny.yaml", "pair.yaml"))
    assert run("diff", "tiny.yaml", "tiny.yaml").startswith("no value differs")
    report = json.loads(run("diff", "tiny.yaml", "pair.yaml", "--json"))
    (sizes,) = [difference for difference in report["differences"] if difference["path"] == "vocab_size"]
    assert (sizes["before"], sizes["after"]) == ("50", "40")


def test_models_of_one_name_are_told_apart(run: Callable[..., str], specs: Path) -> None:
    Path("again.yaml").write_text(Path("tiny.yaml").read_text().replace("d_model: 16", "d_model: 32"))
    head = run("diff", "tiny.yaml", "again.yaml").splitlines()[0]
    assert head.split() == ["value", "tiny.yaml", "again.yaml"]
    assert json.loads(run("diff", "tiny.yaml", "again.yaml", "--json"))["b"] == "again.yaml"
    columns = run("params", "tiny.yaml", "again.yaml").splitlines()[0]
    assert columns.split() == ["component", "tiny.yaml", "share", "again.yaml", "share"]
    Path("again.yaml").write_text(Path("tiny.yaml").read_text().replace("name: tiny", "name: other"))
    assert run("diff", "tiny.yaml", "again.yaml").splitlines()[2].split() == ["value", "tiny", "other"]


def test_set_changes_the_side_that_is_a_spec(run: Callable[..., str]) -> None:
    Path("published").mkdir()
    shutil.copy(PUBLISHED, "published/config.json")
    for sides in (("gpt2", "published"), ("published", "gpt2")):
        report = json.loads(run("diff", *sides, "--set", "decoder.n_layers=3", "--json"))
        (layers,) = [item for item in report["differences"] if item["path"].endswith("n_layers")]
        assert (layers["before"], layers["after"]) == tuple("3" if side == "gpt2" else "12" for side in sides)

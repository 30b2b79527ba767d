"""The command `params`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_params(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params", run("params", "tiny.yaml"))


@pytest.mark.parametrize("by", ["node", "layer", "module"])
def test_params_by(run: Callable[..., str], golden: Golden, by: str) -> None:
    golden(f"cli/params_by_{by}", run("params", "pair.yaml", "--by", by))


def test_params_side_by_side(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params_side_by_side", run("params", "tiny.yaml", "pair.yaml", "tiny.yaml"))


def test_params_of_a_single_block(run: Callable[..., str]) -> None:
    rows = {line.split()[0]: line.split()[1] for line in run("params", "block_512").splitlines() if "%" in line}
    assert rows == {
        "attention": "1,048,576",
        "FFN": "2,097,152",
        "LayerNorm": "2,048",
        "total": "3,147,776",
    }


def test_params_fit_80_columns_at_any_size(run: Callable[..., str]) -> None:
    run("params", "llama3_405b", "palm_540b", "gpt3_175b")


def test_params_json(run: Callable[..., str]) -> None:
    (count,) = json.loads(run("params", "tiny.yaml", "--json"))
    assert count["total"] == sum(row["parameters"] for row in count["rows"]) == count["trainable"]
    assert [row["name"] for row in count["rows"]] == ["embedding", "position", "attention", "ffn", "norm"]

"""The command `params`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tfkit.tools.common.memory_needs import CacheSize
from tfkit.tools.params.command import _count_notes
from tfkit.tools.params.count import Params

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_params(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params", run("params", "tiny.yaml"))


@pytest.mark.parametrize("by", ["node", "layer", "module"])
def test_params_by(run: Callable[..., str], golden: Golden, by: str) -> None:
    golden(f"cli/params_by_{by}", run("params", "pair.yaml", "--by", by))


def test_params_side_by_side(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/params_side_by_side", run("params", "tiny.yaml", "pair.yaml", "tiny.yaml"))


def test_each_size_stands_in_its_note() -> None:
    cache = CacheSize("bfloat16", per_token=10, states=20, windows=(), per_memory_token=30, max_len=4000, at_max_len=50)
    count = Params("small", "node", (), 9000, 8000, 7000, 6000, 500, ("a note",), cache)
    assert [*_count_notes(count)] == [
        "trainable 7,000, frozen 2,000, buffers 500",
        "experts: one token uses 6,000 parameters",
        "a note",
        "KV cache in bfloat16: 10 B per token, 30 B per token of the memory, 20 B of states, 50 B at 4,000 tokens",
    ]


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

"""The command `show`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_show(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/show", run("show", "tiny.yaml", "--set", "decoder.n_layers=3"))
    golden("cli/show_pair", run("show", "pair.yaml"))


def test_show_json(run: Callable[..., str]) -> None:
    report = json.loads(run("show", "tiny.yaml", "--json"))
    values = {value["path"]: value for value in report["values"]}
    assert values["graph.decoder.d_model"] == {
        "path": "graph.decoder.d_model",
        "value": "16",
        "how": "inherited",
        "file": "tiny.yaml",
        "line": 4,
    }
    assert report["programs"][0]["lines"] == [
        "x = x + dropout(attention(layernorm(x)))",
        "x = x + dropout(ffn(layernorm(x)))",
    ]


def test_points(run: Callable[..., str], golden: Golden) -> None:
    golden("cli/show_points", run("show", "pair.yaml", "--points"))
    points = json.loads(run("show", "tiny.yaml", "--points", "--json"))["points"]
    assert points[1] == {"name": "decoder.layers.0.stream.in", "shape": "[b, t, 16]"}

"""The command `validate`."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tfkit.cli import main

pytestmark = pytest.mark.usefixtures("specs")


def test_validate(run: Callable[..., str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("validate", "tiny.yaml", "pair.yaml") == "tiny.yaml: ok\npair.yaml: ok\n"
    assert main(["validate", "tiny.yaml", "wrong.yaml", "pair.yaml"]) == 1
    out, err = capsys.readouterr()
    assert out == "tiny.yaml: ok\npair.yaml: ok\n"
    assert err.startswith("error: ")
    results = json.loads(run("validate", "tiny.yaml", "wrong.yaml", "--json", status=1))
    assert [(result["spec"], len(result["errors"])) for result in results] == [("tiny.yaml", 0), ("wrong.yaml", 2)]

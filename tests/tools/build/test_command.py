"""The command `build`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

import tfkit
from tests.texts import FAILING_PLUGIN, TINY
from tfkit.tools.build import first_run

Golden = Callable[[str, str], None]
pytestmark = pytest.mark.usefixtures("specs")


def test_build(run: Callable[..., str], golden: Golden) -> None:
    for name in ("tiny", "pair"):
        golden(f"cli/build_{name}", re.sub(r"\d+\.\d\d s", "0.00 s", run("build", f"{name}.yaml")))


def test_the_times_of_the_build_and_of_the_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(perf_counter=iter([10.0, 13.0, 20.0]).__next__)
    monkeypatch.setattr(first_run, "time", clock)
    _, report = first_run.first_run(tfkit.loads(TINY))
    assert (report.build_time, report.forward_time) == (3.0, 7.0)


def test_build_on_meta(run: Callable[..., str]) -> None:
    report = json.loads(run("build", "gpt2", "--device", "meta", "--dtype", "bfloat16", "--json"))
    assert report["parameters"] == 124_439_808
    assert report["bytes"] == 2 * report["parameters"]
    assert report["nodes"][-1]["shape"] == [2, 16, 50257]
    assert report["files"] == []


def test_build_writes_a_model(run: Callable[..., str], specs: Path) -> None:
    files = json.loads(run("build", "tiny.yaml", "-o", "deep/out", "--seed", "3", "--json"))["files"]
    assert [Path(file).name for file in files] == ["spec.yaml", "model.safetensors"]
    assert {path.name for path in (specs / "deep").iterdir()} == {"out"}
    assert "already exists" in run("build", "tiny.yaml", "-o", "deep/out", status=1, stderr=True)
    run("build", "tiny.yaml", "-o", "deep/out", "--force")
    assert json.loads(run("params", "deep/out/spec.yaml", "--json"))[0]["name"] == "tiny"


def test_build_refuses_what_does_not_fit(
    run: Callable[..., str], golden: Golden, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tfkit.tools.common.memory_needs.free_memory", lambda device: 10_000)
    golden("cli/no_memory", run("build", "tiny.yaml", status=1, stderr=True))
    run("build", "tiny.yaml", "--device", "meta")


def test_build_names_the_node_that_fails(run: Callable[..., str], specs: Path) -> None:
    (specs / "failing.py").write_text(FAILING_PLUGIN)
    (specs / "fails.yaml").write_text(TINY.replace("{kind: gelu, d_ff: 32}", "fails"))
    actual = run("build", "fails.yaml", "--plugin-dir", "failing.py", status=1, stderr=True)
    assert actual.startswith("error: the forward of ffn kind `fails` fails, in `decoder.layers.0.ffn`: RuntimeError: ")
    assert "(graph.decoder.ffn)" in actual
    assert "/failing.py:8" in actual.replace("\n     ", "")
    actual = run("cost", "fails.yaml", "--plugin-dir", "failing.py", status=1, stderr=True)
    assert actual.startswith("error: the forward of ffn kind `fails` fails, in `decoder.layers.0.ffn`: ")

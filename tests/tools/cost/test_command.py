"""The command `cost`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tfkit
from tfkit.cli import main
from tfkit.tools.cost.command import _memory_notes
from tfkit.tools.cost.cost import Cost, MemoryCost, cost
from tfkit.tools.cost.devices import device_of_driver, find_device, listed_devices, read_device

from ...sampling import some

SPEC = ("vaswani_base", "--set", "encoder.n_layers=2", "--set", "decoder.n_layers=2")


@pytest.mark.parametrize(
    ("name", "arguments"),
    some(
        [
            ("train", ["gpt2", "--batch", "8", "--device", "h200"]),
            ("train_recompute", ["gpt2", "--recompute", "--optimizer", "sgd", "--dtype", "float32"]),
            ("prefill", [*SPEC, "--mode", "prefill", "--length", "64", "--memory-length", "32", "--by", "node"]),
            ("decode_by_layer", ["mistral_7b", "--mode", "decode", "--device", "rtx4090", "--by", "layer"]),
        ],
        2,
    ),
)
def test_tables(run: Callable[..., str], golden: Any, name: str, arguments: list[str]) -> None:
    golden(f"cli/cost_{name}", run("cost", *arguments))


@pytest.mark.parametrize(
    ("name", "arguments", "status"),
    [
        ("unknown_device", ["gpt2", "--device", "h20"], 2),
        ("no_figures_of_a_type", ["gpt2", "--device", "l4", "--dtype", "float64"], 2),
        ("recompute_without_backward", ["gpt2", "--recompute", "--mode", "decode"], 2),
        ("optimizer_without_backward", ["gpt2", "--optimizer", "sgd", "--mode", "prefill"], 2),
        ("no_memory", ["gpt2", "--memory-length", "3"], 2),
        ("no_tokens", ["gpt2", "--length", "0"], 2),
        ("too_long", ["gpt2", "--length", "1025"], 1),
        ("no_decoder", ["bert_base", "--mode", "decode"], 1),
    ],
)
def test_errors(run: Callable[..., str], golden: Any, name: str, arguments: list[str], status: int) -> None:
    golden(f"cli/cost_{name}", run("cost", *arguments, status=status, stderr=True))


@pytest.mark.parametrize(
    ("mode", "recompute", "lines"),
    [
        (
            "train",
            False,
            ["weights 10 B, gradients 20 B, adamw 30 B, activations 40 B", "peak 90 B, with --recompute 95 B"],
        ),
        (
            "train",
            True,
            ["weights 10 B, gradients 20 B, adamw 30 B, activations 50 B", "peak 90 B, with --recompute 95 B"],
        ),
        (
            "decode",
            False,
            [
                "weights 10 B, cache 60 B, peak 90 B",
                "KV cache: 70 B for each token of a sequence",
                "states: 80 B for each sequence, of any length",
            ],
        ),
    ],
)
def test_each_size_stands_in_its_note(mode: Any, recompute: bool, lines: list[str]) -> None:
    memory = MemoryCost(10, 20, 30, 40, 50, 60, 70, 80, 90, 95)
    optimizer = "adamw" if mode == "train" else None
    costs = Cost("small", mode, 1, 8, None, "bfloat16", optimizer, recompute, (), memory)
    assert [note.removeprefix("memory: ") for note in _memory_notes(costs)] == lines
    device = listed_devices()["h100"]
    assert [costs.floor(replace(device, memory=memory)).fits for memory in (89, 92, 95)] == [False, not recompute, True]


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cost", "mixtral_8x7b", "--length", "16", "--json", "--by", "layer", "--device", "mi300x"]) == 0
    report = json.loads(capsys.readouterr().out)
    expected = cost(tfkit.load("mixtral_8x7b"), length=16)
    assert report["total"]["flops_forward"] == expected.total.flops_forward
    assert sum(row["traffic_backward"] for row in report["rows"]) == expected.total.traffic_backward
    assert report["memory"] == vars(expected.memory)
    assert report["floor"]["seconds"] == pytest.approx(expected.floor(listed_devices()["mi300x"]).seconds)
    assert not report["floor"]["fits"]


def test_the_floor_is_the_larger_of_flops_and_bytes() -> None:
    actual = cost(tfkit.load("llama3_8b", sets=["decoder.n_layers=2"]), length=64, mode="decode")
    device = listed_devices()["h100"]
    floor = actual.floor(device)
    assert floor.transfer == pytest.approx(actual.total.traffic / 3.35e12)
    assert floor.compute == pytest.approx(actual.total.flops / 989.5e12)
    assert floor.transfer == pytest.approx(floor.seconds)  # one token: nothing but reading weights
    long = cost(tfkit.load("llama3_8b", sets=["decoder.n_layers=2"]), length=4096, mode="prefill").floor(device)
    assert long.compute < long.seconds < long.compute + long.transfer


def test_hidden_pairs_cost_no_time_where_they_are_skipped() -> None:
    actual = cost(tfkit.load("gpt2"), length=1024)
    device = listed_devices()["h200"]
    assert actual.floor(device, visible=True).seconds < actual.floor(device).seconds


@pytest.mark.parametrize("device", listed_devices().values(), ids=listed_devices())
def test_devices_are_plausible(device: Any) -> None:
    half = device.tera_flops["bfloat16"]
    assert half == device.tera_flops["float16"] > device.tera_flops["tf32"] >= device.tera_flops["float32"]
    assert 50 < half * 1e12 / device.bandwidth < 500  # FLOPs per byte, where both take as long
    assert device.source.startswith("https://")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "adam"}, "got 'adam': a similar one is 'adamw'"),
        ({"batch": 0}, "an integer of 1 or more; got 0"),
        ({"memory_length": 4}, "has no effect"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cost(tfkit.load("gpt2"), **options)


@pytest.mark.parametrize(
    ("driver_name", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A100-SXM4-40GB", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA L40S", None),
    ],
)
def test_a_sister_of_a_device_is_another_device(driver_name: str, name: str | None) -> None:
    actual = device_of_driver(driver_name)
    assert (actual.name if actual else None) == name


DEVICE = "title: Mine\nflops: {bfloat16: 1e12, float32: 100e9}\nbandwidth: 1e9\nmemory: 4e9\n"


def test_figures_of_ones_own(run: Callable[..., str], tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(DEVICE)
    actual = cost(tfkit.load("gpt2"), length=64)
    floor = actual.floor(read_device(file))
    assert floor.compute == pytest.approx(actual.total.flops / 1e12)
    assert floor.transfer == pytest.approx(actual.total.traffic / 1e9)
    assert "floor on Mine: " in run("cost", "gpt2", "--length", "64", "--device", str(file))
    file.write_text(DEVICE.replace("title: Mine\n", ""))
    assert "floor on mine: " in run("cost", "gpt2", "--length", "64", "--device", str(file))
    diagnostic = run("cost", "gpt2", "--dtype", "float64", "--device", str(file), status=2, stderr=True)
    assert "there are no figures for float64 on mine; known: bfloat16, float32" in diagnostic


def test_the_file_of_a_device_is_relative_to_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder, bandwidth in ((tmp_path, "3e9"), (tmp_path / "sweeps", "7e9")):
        folder.mkdir(exist_ok=True)
        (folder / "mine.yaml").write_text(DEVICE.replace("bandwidth: 1e9", f"bandwidth: {bandwidth}"))
    monkeypatch.chdir(tmp_path)
    assert find_device("mine.yaml", folder=tmp_path / "sweeps").bandwidth == 7e9
    assert find_device("mine.yaml").bandwidth == 3e9


@pytest.mark.parametrize(
    ("name", "before", "after"),
    [
        ("unknown_key", "bandwidth", "bandwith"),
        ("unknown_type", "float32", "fp32"),
        ("negative", "memory: 4e9", "memory: -4e9"),
        ("missing", "memory: 4e9\n", ""),
        ("text", "1e9", "fast"),
        ("no_types", "{bfloat16: 1e12, float32: 100e9}", "{}"),
    ],
)
def test_figures_that_are_none(
    name: str, before: str, after: str, run: Callable[..., str], golden: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(DEVICE.replace(before, after))
    golden(f"cli/cost_figures_{name}", run("cost", "gpt2", "--device", "mine.yaml", status=1, stderr=True))

"""The command `profile`: its output, and the stream of the output."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tfkit.tools.profile import models
from tfkit.tools.profile.profile_tables import show_profiles
from tfkit.tools.profile.result import ComponentTime, KernelTime, Limits, MemoryUse, Profile

SPEC = """\
tfkit: 1
name: {name}
d_model: 16
vocab_size: 50
max_len: 32
graph:
  embedding: {{block: embedding, position: learned}}
  decoder: {{block: decoder, n_layers: 2, attention: {{n_heads: 2}}, ffn: {{kind: gelu, d_ff: 32}}, norm: {norm}}}
  logits: {{block: lm_head, tie: embedding}}
"""
QUICK_OPTIONS = ("--steps", "2", "--warmup", "0", "--length", "8")
Run = Callable[..., str]


@pytest.fixture(autouse=True)
def specs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, norm in (("one", "layernorm"), ("other", "rmsnorm")):
        (tmp_path / f"{name}.yaml").write_text(SPEC.format(name=name, norm=norm))
    monkeypatch.setattr(models, "limits_of", lambda device, dtype: Limits("a device", 1e11, 1e10, "measured"))


def masked(text: str) -> str:
    """The text with `0` for every number, and with blanks and lines of one length."""
    text = re.sub(r"^on .*$", "on a device", re.sub(r"\d[\d,]*(\.\d+)?[KM]?", "0", text), flags=re.MULTILINE)
    text = re.sub(r"─+", "───", re.sub(r" (kB|MB|GB|B)\b", " B", text))
    return "\n".join(re.sub(r" {2,}", "  ", line).rstrip() for line in text.splitlines())


def rows(text: str) -> list[str]:
    """The first words of the lines of the first table."""
    lines = text.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("─"))
    return [re.split(r"  +", line)[0] for line in lines[start + 1 :]][: lines[start:].index("")]


def test_a_table(run: Run, golden: Callable[[str, str], None]) -> None:
    text = run("profile", "one.yaml", "--device", "cpu", *QUICK_OPTIONS)
    head = [line for line in text.splitlines() if "memory: peak" not in line]
    operators = next(i for i, line in enumerate(head) if line.startswith("operator"))
    golden("cli/profile", masked("\n".join(head[: operators + 1])))
    assert re.search(r"^memory: peak [\d.]+ kB in \S+, (forward|backward)$", text, re.MULTILINE)


def part(path: str, label: str, *numbers: Any) -> ComponentTime:
    node, component = path.partition(".")[0], path.rpartition(".")[2]
    return ComponentTime(path, component, label, node, path.removesuffix(f".{component}"), *numbers)


MEASURED = Profile(
    name="one",
    device="cuda:0",
    device_name="a device",
    mode="train",
    dtype="bfloat16",
    batch=3,
    length=500,
    compiled=False,
    parameters=7000,
    steps=(0.9, 1.1),
    plain_steps=(0.2, 0.4, 0.8),
    parts=(  # calls, seconds of forward, of backward, on the device; bytes; FLOPs, traffic, floor
        part("embedding", "embedding", 1, 0.01, 0.02, 0.03, 1 << 10, 1 << 11, 1 << 12),
        part("decoder.0.attention", "attention", 1, 0.1, 0.15, 0.2, 3 << 20, 2 << 20, 9 << 20, 9e11, 5e8, 0.1),
        part("decoder.1.attention", "attention", 2, 0.12, 0.2, 0.3, 5 << 20, 1 << 20, 7 << 20, 8e11, 4e8, 0.05),
        part("decoder.1.ffn", "FFN", 1, 0.04, 0.06, 0.1, 7 << 20, 4 << 20, 8 << 20, 3e11, 6e8, 0.04),
        part("optimizer", "optimizer", 1, 0.05, 0.0, 0.05, 0, 0, 6 << 20),
    ),
    kernels=(
        KernelTime("aten::mm", "ffn", "FFN", "backward", 4, 0.07),
        KernelTime("a_kernel_with_a_name_of_more_than_34_letters", "attention", "attention", "forward", 2.5, 0.03),
    ),
    unattributed=0.25,
    idle=0.1,
    memory=MemoryUse(90 << 20, 50 << 20, 20 << 20, 40 << 20, 10 << 20, 0, "decoder.1.attention", "backward"),
    limits=Limits("a device", 2e13, 3e11, "a data sheet"),
    notes=("a note",),
)


@pytest.mark.parametrize("by", ["component", "layer"])
def test_each_number_stands_in_its_column(
    by: Any, golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """3 x 500 tokens in 0.3 s without the profiler, which is 5.0K tokens/s; 1,000 ms under the profiler."""
    monkeypatch.setenv("COLUMNS", "120")
    show_profiles([MEASURED], by)
    text = capsys.readouterr().out
    assert "a step takes 300.00 ms, 5.0K tokens/s; under the profiler 1,000 ms" in text
    golden(f"cli/profile_by_{by}", text)


def test_each_profile_stands_in_its_columns(
    golden: Callable[[str, str], None], capsys: pytest.CaptureFixture[str]
) -> None:
    parts = tuple(replace(part, forward=2 * part.forward, backward=0.0) for part in MEASURED.parts[1:])
    decode = replace(
        MEASURED, name="other", mode="decode", compiled=True, steps=(2.0,), plain_steps=(1.5,), parts=parts
    )
    show_profiles([MEASURED, decode], "component")
    golden("cli/profile_two", capsys.readouterr().out)


@pytest.mark.parametrize("mode", ["prefill", "decode"])
def test_other_modes_have_no_backward(mode: str, run: Run) -> None:
    text = run("profile", "one.yaml", "--device", "cpu", "--mode", mode, "--by", "layer", *QUICK_OPTIONS)
    assert text.startswith(f"one: {mode}, 1 x {'token 8' if mode == 'decode' else '8 tokens'}, float32\n")
    assert "backward" not in text
    names = rows(text)
    assert [name for name in names if "layers" in name] == ["decoder.layers.0", "decoder.layers.1"]


def test_side_by_side(run: Run, golden: Callable[[str, str], None]) -> None:
    text = run("profile", "one.yaml", "other.yaml", "--device", "cpu", "--mode", "prefill", *QUICK_OPTIONS)
    lines = text.splitlines()
    golden("cli/profile_side_by_side", masked("\n".join(lines[: lines.index("")])))
    assert "one: prefill" in text
    assert "other: prefill" in text


def test_json(run: Run) -> None:
    (report,) = json.loads(run("profile", "one.yaml", "--device", "cpu", "--mode", "prefill", *QUICK_OPTIONS, "--json"))
    assert report["name"] == "one"
    times = [part["forward"] + part["backward"] for part in report["parts"]]
    assert sum(times) + report["unattributed"] == pytest.approx(report["step"])
    assert report["tokens_per_second"] == pytest.approx(8 / report["plain_step"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_device_that_is_not_there_is_wrong_usage(run: Run) -> None:
    """As with `build`, and not a run on another device under the name of this one."""
    for command in ("profile", "build"):
        err = run(command, "one.yaml", "--device", "cuda", status=2, stderr=True)
        assert err.startswith("error: invalid value for --device: `cuda` cannot be used here: ")


def test_a_folder(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    arguments = ("profile", "one.yaml", "--device", "cpu", "--mode", "prefill", *QUICK_OPTIONS)
    assert "wrote out: open out/report.html, or tensorboard --logdir out" in run(*arguments, "-o", "out")
    assert (tmp_path / "out/report.html").is_file()
    (tmp_path / "out/mine.txt").write_text("")
    complaint = run(*arguments, "-o", "out", status=1, stderr=True)
    assert complaint == (
        "error: `out` must hold only the files of a profile; got mine.txt\n   = help: name a new folder\n"
    ) or complaint.startswith("error: `out` must hold only the files of a profile; got mine.txt")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("one.yaml", "one.yaml", "one.yaml"), "the command must have one or two specs; got 3"),
        (("one.yaml", "other.yaml", "--weights", "one.yaml"), "--weights cannot be combined with several models"),
        (("one.yaml", "--steps", "1"), "`--steps` must be an integer from 2; got 1"),
        (("one.yaml", "--device", "meta"), "nothing runs on the meta device"),
        (("one.yaml", "--mode", "sleep"), "`sleep` is not one of"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], says: str, run: Run) -> None:
    assert says in run("profile", *arguments, status=2, stderr=True)


def test_too_long(run: Run) -> None:
    complaint = run("profile", "one.yaml", "--device", "cpu", "--length", "99", status=1, stderr=True)
    assert "99 tokens are more than max_len (32), which can be set when building: --set max_len=N" in complaint

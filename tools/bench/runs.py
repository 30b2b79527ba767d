"""`tfkit train` of a model of GPT-2's size, on one GPU and on several: tokens per second, and the same losses.

The time of a step is the time difference between a long and a short run, divided by the difference of their steps. It
therefore includes neither the start of the processes nor the compilation. `gpu.py` calls this module.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

COUNTS = (1, 2, 4, 8)
SHORT_STEPS, LONG_STEPS = 20, 80
"""Steps of the two runs."""
PATIENCE = 240
"""Seconds after which a run counts as hanging and is killed."""
RUN = """\
tfkit: 1
name: runs
model: {{extends: gpt2, vocab_size: data.vocab_size, dropout: 0{small}}}
data: {{kind: text, files: symbols.txt}}
batch: {{sequences: {sequences}, length: {length}}}
steps: {steps}
optimizer: {{kind: adamw, lr: 1e-4}}
precision: {precision}
clip: 1.0
machine: {machine}
"""
VARIANTS: tuple[dict[str, Any], ...] = (
    {"compile": "layers"},
    {"recompute": "full"},
    {"recompute": "selective"},
    {"gather": "bfloat16"},
    *({"float8": recipe} for recipe in ("tensorwise", "rowwise") if find_spec("torchao")),
)
"""Additional settings of `machine`, measured on the maximum number of processes with sharded weights."""
SMALL_SIZES = ", d_model: 32, max_len: 16, graph: {decoder: {n_layers: 2, attention: {n_heads: 2}, ffn: {d_ff: 64}}}"


def runs(*, rehearse: bool, device: str) -> dict[str, dict[str, Any]]:
    """Return the measurements by number of processes: with sharded weights, and with a copy of the weights in each."""
    limit = 2 if rehearse else torch.cuda.device_count()
    results: dict[str, dict[str, Any]] = {}
    for count in (processes for processes in COUNTS if processes <= limit):
        for shard in sorted({1, count}, reverse=True):
            results[f"{count} x {shard}"] = _measured(count, shard, rehearse=rehearse, device=device)
    for variant in VARIANTS:
        name = ", ".join(f"{key}: {value}" for key, value in variant.items())
        count = max(processes for processes in COUNTS if processes <= limit)
        results[name] = _measured(count, count, rehearse=rehearse, device=device, variant=variant) | {"variant": name}
    first = results["1 x 1"]
    for result in results.values():
        pairs = zip(result["losses"], first["losses"], strict=True)
        result["farthest loss"] = max(abs(loss - other) for loss, other in pairs)
        result["of ideal"] = result["tokens_per_second"] / first["tokens_per_second"] / result["processes"]
    return results


def _measured(
    count: int, shard: int, *, rehearse: bool, device: str, variant: Mapping[str, Any] = MappingProxyType({})
) -> dict[str, Any]:
    """Measure a long and a short run: the same batch for all process counts, in micro-batches of one process's size."""
    sequences, length = (8, 16) if rehearse else (256, 1024)
    sizes = {"sequences": sequences, "length": length}
    machine = {"device": device, "compile": not rehearse, "micro_batch": sequences // 8, "shard": shard, **variant}
    precision = "float32" if rehearse and not {"gather", "float8"} & {*variant} else "bfloat16"
    how = {"precision": precision, "machine": json.dumps(machine)}
    seconds, losses = {}, []
    with tempfile.TemporaryDirectory() as location:
        folder = Path(location)
        write_symbols(folder / "symbols.txt", 97 if rehearse else 50304, 4 * sequences * length)
        for steps in (SHORT_STEPS, LONG_STEPS):
            text = RUN.format(small=SMALL_SIZES if rehearse else "", steps=steps, **sizes, **how)
            (folder / "run.yaml").write_text(text, encoding="utf-8")
            speed = _launched(folder, count, f"out-{steps}")["tokens_per_second"]
            seconds[steps] = steps * sequences * length / speed
            lines = (folder / f"out-{steps}" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
            losses = [numbers["loss"] for numbers in map(json.loads, lines) if "loss" in numbers][:SHORT_STEPS]
    speed = (LONG_STEPS - SHORT_STEPS) * sequences * length / (seconds[LONG_STEPS] - seconds[SHORT_STEPS])
    return {"processes": count, "shard": shard, "tokens_per_second": speed, "losses": losses}


def _launched(folder: Path, count: int, name: str) -> dict[str, Any]:
    """Return the result of a run, as `--json` prints it."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", "tfkit"]
    command = [sys.executable, *launcher, "train", "run.yaml", "-o", name, "--json"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def write_symbols(path: Path, symbols: int, size: int) -> None:
    """Write a text of `symbols` different characters, none of them a surrogate, each at least once."""
    drawn = torch.randint(symbols, (size,), generator=torch.Generator().manual_seed(0)).tolist()
    path.write_text("".join(chr(0x10000 + symbol) for symbol in [*range(symbols), *drawn]), encoding="utf-8")


def show(results: dict[str, dict[str, Any]]) -> None:
    """Print a line for each number of processes."""
    print("  tfkit train, GPT-2's size, one batch for all:")
    for result in results.values():
        how = result.get("variant") or f"processes: {result['processes']}, weights over {result['shard']}"
        speed = f"{result['tokens_per_second']:,.0f} tokens/s"
        print(f"    {how:28}{speed:>20}  {result['of ideal']:.0%} of ideal, losses to {result['farthest loss']:.0e}")

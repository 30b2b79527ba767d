"""The cost of an export to TorchScript, compared with `torch.jit.trace`, and the speed of the file against the model's.

    OMP_NUM_THREADS=1 python tools/bench/export.py [--model gpt2] [--rounds 8] [--json]

Writing: `tfkit.tools.export` scripts and saves the full forward and the cached decoding step; `torch.jit.trace`, with
its defaults, traces the forward at a single shape, checks it, and saves it. The comparison with the model at seven
shapes, which `tfkit export` runs before it reports success, is measured separately. Running: the loaded file is
compared with the model without gradients, at several shapes and token by token.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import compare_speeds, ratio, seconds, take_turns

import tfkit
from tfkit.tools.common.model_inputs import export_inputs
from tfkit.tools.export.export import export
from tfkit.tools.export.torchscript_format import TorchScript

SHAPES = [(1, 16), (1, 256), (4, 128)]
STEPS = 16


def writers(model: Any, folder: Path) -> dict[str, Callable[[], float]]:
    """Return the writers of files, by name."""
    tokens, inputs = torch.randint(50257, (2, 64)), export_inputs(model)

    def write() -> None:
        TorchScript().write(model, inputs, folder / "script.pt")

    def trace() -> None:
        torch.jit.save(torch.jit.trace(model, tokens), str(folder / "trace.pt"))

    def checked_export() -> None:
        export(model, folder / "checked.pt")

    def trace_alone() -> None:
        torch.jit.trace(model, tokens)

    runs = {
        "trace + save": trace,
        "script + save": write,
        "trace alone": trace_alone,
        "export, compared": checked_export,
    }
    return {name: lambda run=run: seconds(run) for name, run in runs.items()}  # type: ignore[misc]


def runners(model: Any, loaded: Any, batch: int, length: int) -> dict[str, Callable[[], float]]:
    """Return the measurements of the model and the file on one batch."""
    tokens = torch.randint(50257, (batch, length))
    return {"file": lambda: seconds(lambda: loaded(tokens)), "model": lambda: seconds(lambda: model(tokens))}


def decoders(model: Any, loaded: Any) -> dict[str, Callable[[], float]]:
    """Return the measurements of the cached steps of the model and of the file."""
    prompt, token = torch.randint(50257, (1, 16)), torch.tensor([[1]])
    cached = tfkit.CachedModel(model, length=16 + STEPS)

    def by_file() -> None:
        state = loaded.start(1, 16 + STEPS)
        loaded.step(state, prompt, keep=1)
        for _ in range(STEPS):
            loaded.step(state, token)

    def by_model() -> None:
        cached.start(1)
        cached(prompt, keep=1)
        for _ in range(STEPS):
            cached(token)

    return {"file": lambda: seconds(by_file), "model": lambda: seconds(by_model)}


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="gpt2", help="a spec")
    parser.add_argument("--rounds", type=int, default=8, help="rounds that count")
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # torch's, about TorchScript's age and about values frozen by a trace
    model = tfkit.build(options.model).eval()
    results = {}
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        results["write"] = take_turns(writers(model, Path(folder)), max(2, options.rounds // 2), warm_up=1)
        loaded = torch.jit.load(str(Path(folder) / "script.pt"))
        for batch, length in SHAPES:
            results[f"run {batch} x {length}"] = take_turns(runners(model, loaded, batch, length), options.rounds)
        results[f"decode {STEPS} tokens"] = take_turns(decoders(model, loaded), options.rounds)
    if options.json:
        json.dump(results, sys.stdout, indent=2)
        return
    print(f"{options.model}, torch {torch.__version__}, {torch.get_num_threads()} threads, CPU time")
    for name, times in results.items():
        print(f"\n{name}\n{compare_speeds(times)}")
    write, run = results["write"], {name: times for name, times in results.items() if name != "write"}
    print(f"\nscript + save: {ratio(write['script + save'], write['trace + save'])} times trace + save")
    for name, times in run.items():
        print(f"{name}: the file takes {ratio(times['file'], times['model'])} times the model's time")


if __name__ == "__main__":
    main()

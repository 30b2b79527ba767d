"""The cost of the code that `tfkit save --layout transformers` writes, relative to the original model.

    python tools/bench/remote_code.py [--rounds 8] [--tokens 200] [--prompt 16 1000] [--batch 1] [--json]

One process, one thread, float32, CPU time. A GPT-2 with 4 layers of width 256 takes turns with its folder, opened by
transformers, and with transformers' GPT-2: a training step without the optimizer, and greedy decoding. All must return
the same logits and write the same tokens. `loop` is the shortest loop around a forward, `generate` the function of the
library.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
from decode import Tfkit, Transformers
from measure import compare_speeds, machine, per_token, ratio, seconds, take_turns
from peers import Shape, peer
from torch import Tensor, fx, nn
from torch.nn import functional as F
from transformers import AutoModelForCausalLM

import tfkit

SHAPE = Shape("gpt2", 4, 256, 4, 4, 1024, vocab_size=4096, length=1536, batch=1)
STEP = (4, 256)
"""Sequences and tokens of a training step."""
TRAINING, DECODING = 1.03, 1.05
"""The goals: time of the folder over the time of the model."""
TOLERANCE = 1e-5
Turns = dict[str, list[float]]


def models() -> dict[str, nn.Module]:
    """Return the model, its folder as transformers opens it, and the class of transformers, with the same weights."""
    model = peer("tfkit").build(SHAPE)
    assert isinstance(model, fx.GraphModule)
    with tempfile.TemporaryDirectory() as folder:
        tfkit.save(model, Path(folder) / "written", layout="transformers")
        written: Any = AutoModelForCausalLM.from_pretrained(Path(folder) / "written", trust_remote_code=True)
    other = peer("transformers").build(SHAPE, model.state_dict())
    return {"tfkit": model, "folder": written, "transformers": other}


def logits(name: str, model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the logits; transformers computes them without a cache."""
    return model(tokens) if name == "tfkit" else model(tokens, use_cache=False).logits


def train(everybody: Mapping[str, nn.Module], rounds: int) -> Turns:
    """Measure forward, loss and backward."""
    text = torch.randint(SHAPE.vocab_size, (STEP[0], STEP[1] + 1))
    tokens, targets = text[:, :-1].contiguous(), text[:, 1:].flatten()

    def step(name: str, model: nn.Module) -> None:
        F.cross_entropy(logits(name, model, tokens).flatten(0, 1), targets).backward()
        model.zero_grad(set_to_none=True)

    def clock(name: str, model: nn.Module) -> Callable[[], float]:
        return lambda: seconds(lambda: step(name, model))

    with torch.no_grad():
        values = {name: logits(name, model, tokens) for name, model in everybody.items()}
    differences = {name: (value - values["tfkit"]).abs().max().item() for name, value in values.items()}
    if max(differences.values()) > TOLERANCE:
        raise SystemExit(f"the contenders are different models: {differences}")
    return take_turns({name: clock(name, model.train()) for name, model in everybody.items()}, rounds)


def decode(everybody: Mapping[str, nn.Module], n_prompt: int, options: argparse.Namespace) -> Turns:
    """Measure the time of a token after a prompt."""
    prompt = torch.randint(SHAPE.vocab_size, (options.batch, n_prompt))
    model = everybody["tfkit"]
    assert isinstance(model, fx.GraphModule)
    runs: dict[str, Tfkit | Transformers] = {"tfkit": Tfkit(model, prompt, SHAPE.length, compile=False)}
    runs |= {name: Transformers(other, prompt) for name, other in everybody.items() if name != "tfkit"}
    loops = {f"{name} loop": run.loop for name, run in runs.items()}
    loops |= {f"{name} generate": run.generate for name, run in runs.items()}
    with torch.inference_mode():
        texts = {name: loop(16) for name, loop in loops.items()}
    if not all(torch.equal(text, texts["tfkit loop"]) for text in texts.values()):
        raise SystemExit("the contenders write different tokens")
    clocks = {name: per_token(loop, options.tokens, "cpu") for name, loop in loops.items()}
    return take_turns(clocks, options.rounds, warm_up=1)


def show(title: str, turns: Turns) -> None:
    """Print a table, and the time of the folder over the time of the model."""
    print(f"\n{title}", compare_speeds(turns), sep="\n", flush=True)
    for name in turns:
        if name.startswith("folder"):
            times = ratio(turns[name], turns[name.replace("folder", "tfkit")])
            print(f"  {name} over tfkit's: {times.of_minima:.3f}, {times.median:.3f} in the median", flush=True)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=8, help="runs of each (default 8)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens of a run (default 200)")
    parser.add_argument("--prompt", type=int, nargs="*", default=[16, 1000], help="tokens before (default 16 1000)")
    parser.add_argument("--batch", type=int, default=1, help="sequences of decoding (default 1)")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    everybody = models()
    results: dict[str, Turns] = {}
    if not options.json:
        print(machine(), replace(SHAPE, batch=options.batch), sep="\n")
    for n in (None, *options.prompt):
        step = f"training step of {STEP[0]} x {STEP[1]}; goal {TRAINING}"
        title = f"decoding after {n} tokens; goal {DECODING}" if n else step
        results[title] = decode(everybody, n, options) if n else train(everybody, options.rounds)
        if not options.json:
            show(title, results[title])
    if options.json:
        print(json.dumps({"date": str(date.today()), "machine": machine(), "seconds": results}, indent=2))


if __name__ == "__main__":
    main()

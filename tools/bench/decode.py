"""The cost of a token: greedy decoding with a cache, with tfkit, Hugging Face transformers and litgpt.

    python tools/bench/decode.py [--shape gpt2 | llama | small] [--batch 1 8] [--rounds 10] [--tokens 24] [--compile]
                                 [--python litgpt=../peers/bin/python] [--json]

One thread, float32; on a GPU bfloat16. All contenders have the same weights, read the same prompt and must write the
same tokens. They take turns. The figure is the CPU time of a token, without the prompt; on a GPU, the time between two
CUDA events. `loop` is the shortest loop around a forward, and `generate` the function of the library; the weights of
`prepared` are laid out by `tfkit.prepare_decoding`. transformers uses its default cache. litgpt runs in a separate
process on the CPU, only with Llama shapes, because it has no learned positions.

A token must read all weights and the caches once. The fraction of the limit is the time in which this machine reads
that many bytes, measured by summing the rows of a matrix of that size in the same rounds, over the time of a token.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from measure import accelerator, compare_speeds, machine, per_token, ratio, seconds, take_turns
from peers import Shape, peer
from torch import Tensor, fx, nn
from worker import Worker, interpreter

import tfkit

SHAPES = {
    "gpt2": Shape("gpt2", 12, 768, 12, 12, 3072, vocab_size=50257, length=1024, batch=1),
    "llama": Shape("llama", 12, 768, 12, 12, 3072, vocab_size=32000, length=1024, batch=1),
    "small": Shape("llama", 6, 384, 6, 6, 1024, vocab_size=32000, length=1024, batch=1),
}
GOAL = 1.05
"""The goal: speed relative to the fastest peer."""
PROMPT, CHECKED = 8, 8
Contender = Callable[[int], Tensor]
"""Number of tokens to write -> the tokens, [b, n]."""


class Tfkit:
    """A `CachedModel` in a separate loop, and `tfkit.generate`."""

    def __init__(self, model: fx.GraphModule, prompt: Tensor, length: int, *, compile: bool) -> None:
        self.cached = tfkit.CachedModel(model.eval(), length=length, compile=compile)
        self.prompt = prompt

    def loop(self, n: int) -> Tensor:
        """Write `n` tokens with the shortest loop."""
        self.cached.start(self.prompt.size(0))
        tokens = [self.cached(self.prompt, keep=1).argmax(dim=-1)]
        for _ in range(n - 1):
            tokens.append(self.cached(tokens[-1], keep=1).argmax(dim=-1))
        return torch.cat(tokens, dim=1)

    def generate(self, n: int) -> Tensor:
        """Write `n` tokens with the function that tfkit offers."""
        return tfkit.generate(self.cached, self.prompt, max_new_tokens=n).tokens


class Transformers:
    """transformers, with its own forward and `generate`."""

    def __init__(self, model: nn.Module, prompt: Tensor) -> None:
        self.model = model.eval()
        self.prompt = prompt

    def loop(self, n: int) -> Tensor:
        """Write `n` tokens with the shortest loop."""
        result: Any = self.model(self.prompt, use_cache=True, logits_to_keep=1)
        tokens = [result.logits.argmax(dim=-1)]
        for _ in range(n - 1):
            result = self.model(tokens[-1], cache=result.cache, use_cache=True, logits_to_keep=1)
            tokens.append(result.logits.argmax(dim=-1))
        return torch.cat(tokens, dim=1)

    def generate(self, n: int) -> Tensor:
        """Write `n` tokens with the function that transformers offers."""
        settings = {"max_new_tokens": n, "min_new_tokens": n, "do_sample": False, "pad_token_id": 0}
        model: Any = self.model
        tokens: Tensor = model.generate(self.prompt, attention_mask=torch.ones_like(self.prompt), **settings)
        return tokens[:, self.prompt.size(1) :]


def contenders(shape: Shape, *, compile: bool, device: str) -> tuple[dict[str, Contender], int]:
    """Return all contenders, and the bytes that a token must read: the weights, and half-full caches."""
    prompt = prompt_of(shape).to(device)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    model = peer("tfkit").build(shape)
    state = model.state_dict()
    theirs = peer("transformers").build(shape, state).to(device, dtype)
    assert isinstance(model, fx.GraphModule)
    as_built = Tfkit(copy.deepcopy(model).to(device, dtype), prompt, shape.length, compile=compile)
    tfkit.prepare_decoding(model, shape.batch)
    ours = Tfkit(model.to(device, dtype), prompt, shape.length, compile=compile)
    other = Transformers(theirs, prompt)
    loops: dict[str, Contender] = {"tfkit prepared": ours.loop, "tfkit loop": as_built.loop}
    loops |= {"tfkit generate": as_built.generate}
    loops |= {"transformers loop": other.loop, "transformers generate": other.generate}
    untied = [name for name in state if not (name == "embedding.tokens.weight" and shape.family == "llama")]
    return loops, sum(state[name].numel() for name in untied) * dtype.itemsize


def reading(size: int, device: str) -> Callable[[], float]:
    """Return a function that measures the seconds of reading `size` bytes from memory."""
    data = torch.ones(size // 4 // 1024, 1024, device=device)
    return lambda: seconds(lambda: data.sum(dim=1), device)


@contextmanager
def litgpt(python: str, shape: Shape) -> Iterator[tuple[Worker, Tensor]]:
    """Yield the worker of litgpt, which runs in a separate environment, and the tokens that it writes."""
    worker = Worker([python, str(Path(__file__).with_name("decode_worker.py"))])
    try:
        with tempfile.TemporaryDirectory() as folder:
            torch.save(prompt_of(shape), f"{folder}/prompt.pt")
            torch.save(peer("tfkit").build(shape).state_dict(), f"{folder}/weights.pt")
            answer = worker.ask("build", shape=asdict(shape), folder=folder, n=CHECKED)
        yield worker, torch.tensor(answer["tokens"])
    finally:
        worker.close()


def prompt_of(shape: Shape) -> Tensor:
    """Return the prompt for all contenders."""
    return torch.randint(shape.vocab_size, (shape.batch, PROMPT), generator=torch.Generator().manual_seed(0))


def measure(shape: Shape, options: argparse.Namespace) -> dict[str, Any]:
    """Measure all contenders on one shape."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    everybody, size = contenders(shape, compile=options.compile, device=device)
    with torch.inference_mode():
        texts = {name: run(CHECKED) for name, run in everybody.items()}
    running = {name: per_token(run, options.tokens, device) for name, run in everybody.items()}
    running["memory"] = reading(size, device)
    python = dict(options.python).get("litgpt")
    if python is None or shape.family != "llama" or device != "cpu":
        turns = race(texts, running, options, device)
    else:
        with litgpt(python, shape) as (worker, texts["litgpt loop"]):
            running["litgpt loop"] = lambda: worker.ask("seconds", n=options.tokens)["seconds"]
            turns = race(texts, running, options, device)
    memory = turns.pop("memory")
    return {"shape": str(shape), "batch": shape.batch, "bytes": size, "seconds": turns, "memory_seconds": memory}


def race(
    texts: dict[str, Tensor], running: dict[str, Callable[[], float]], options: argparse.Namespace, device: str
) -> dict[str, list[float]]:
    """Measure the seconds of a token in each round. Raise SystemExit on the CPU if the tokens differ."""
    same = {name: torch.equal(text, texts["tfkit loop"]) for name, text in texts.items()}
    if device == "cpu" and not all(same.values()):
        raise SystemExit(f"the contenders write different tokens: {same}")
    return take_turns(running, options.rounds, warm_up=1)


def show(result: dict[str, Any]) -> None:
    """Print a table, tokens per second and fraction of the limit, and the goal."""
    turns, batch = result["seconds"], result["batch"]
    print(f"\n{result['shape'].rpartition(',')[0]}, batch {batch}, {result['bytes'] / 1e6:.0f} MB a token")
    print(compare_speeds(turns))
    limit = min(result["memory_seconds"])
    for name, rounds in turns.items():
        best, middle = min(rounds), statistics.median(rounds)
        speed = f"{batch / best:>9.1f} tokens/s at best, {batch / middle:.1f} in the median"
        print(f"  {name:22}{speed}; {limit / best:.0%} of the limit")
    peers = {name: rounds for name, rounds in turns.items() if not name.startswith("tfkit")}
    fastest = min(peers, key=lambda name: min(peers[name]))
    prepared_ratio = ratio(peers[fastest], turns["tfkit prepared"])
    verdict = (
        "met" if prepared_ratio.of_minima >= GOAL else "within the spread" if prepared_ratio.high >= GOAL else "MISSED"
    )
    print(f"  prepared, at least {GOAL:.2f} x {fastest}:")
    print(f"    {prepared_ratio.of_minima:.3f}, {prepared_ratio.median:.3f} in the median: {verdict}")


def overhead(rounds: int) -> dict[str, list[float]]:
    """Measure the seconds of a token with almost no arithmetic: 12 layers of width 16."""
    shape = Shape("gpt2", 12, 16, 2, 2, 16, vocab_size=16, length=1024, batch=1)
    everybody, _ = contenders(shape, compile=False, device="cpu")
    return take_turns({name: per_token(run, 64, "cpu") for name, run in everybody.items()}, rounds, warm_up=1)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--shape", choices=SHAPES, help="one of the shapes; all unless given")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8], help="sequences per batch (default 1 8)")
    parser.add_argument("--rounds", type=int, default=10, help="runs of each (default 10)")
    parser.add_argument("--tokens", type=int, default=24, help="tokens of a run (default 24)")
    parser.add_argument("--compile", action="store_true", help="tfkit's step of one token compiled")
    where = {"action": "append", "default": [], "type": interpreter, "metavar": "NAME=PATH"}
    parser.add_argument("--python", **where, help="interpreter of litgpt's own environment")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    options = parser.parse_args()
    torch.set_num_threads(1)
    versions = {name: version(name) for name in ("torch", "transformers")}
    shapes = [SHAPES[options.shape]] if options.shape else list(SHAPES.values())
    results = [measure(replace(shape, batch=batch), options) for shape in shapes for batch in options.batch]
    empty = overhead(options.rounds)
    if options.json:
        about = {"date": str(date.today()), "machine": machine(), "gpu": accelerator(), "versions": versions}
        print(json.dumps({**about, "compiled": options.compile, "found": results, "overhead": empty}, indent=2))
        return
    print(machine(), ", ".join(f"{name} {text}" for name, text in versions.items()), sep="\n")
    print(f"greedy decoding after a prompt of {PROMPT} tokens, {options.tokens} tokens, {options.rounds} rounds")
    for result in results:
        show(result)
    print("\nthe cost of a token without its arithmetic: 12 layers of width 16")
    print(compare_speeds(empty))
    print("\n" + (accelerator() or "not measured: anything on a GPU (there is none here)"))


if __name__ == "__main__":
    main()

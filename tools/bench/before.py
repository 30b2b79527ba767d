"""Compare the speed of this checkout with another checkout, for instance of the commit before a change.

    python tools/bench/before.py CHECKOUT [--rounds 7] [--json]

The other checkout needs a `.venv`. In each round, both checkouts run in turn, each in a fresh process on one thread.
The figures are CPU time, the best of several runs: a training step and a token of a small GPT-2 and a small Llama, a
token with almost no arithmetic, reading and building the largest Llama on the meta device, `tfkit params gpt2`, and
`tfkit --help`.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

from measure import Contender, machine, race, ratio, script

PROBE = """
import json, resource, subprocess, sys, time

def command(*words):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "tfkit", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

figures = {"tfkit --help": min(command("--help") for _ in range(3)), "tfkit params gpt2": command("params", "gpt2")}
import torch, tfkit
torch.set_num_threads(1)
SIZES = ["d_model=256", "vocab_size=4096", "max_len=512", "decoder.n_layers=4", "decoder.attention.n_heads=4",
         "decoder.ffn.d_ff=768"]
SMALL_SIZES = ["d_model=16", "vocab_size=16", "max_len=512", "decoder.n_layers=12", "decoder.attention.n_heads=2",
         "decoder.ffn.d_ff=16"]

def best(run, times):
    run()
    seconds = []
    for _ in range(times):
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
    return min(seconds)

def step(model):
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss, tokens = tfkit.Loss(model.train()), torch.randint(4096, (4, 128))
    def run():
        loss(tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return best(run, 6)

def token(model, n=32):
    cached, prompt = tfkit.CachedModel(model.eval(), length=64), torch.zeros(1, 8, dtype=torch.long)
    @torch.inference_mode()
    def run():
        cached.start(1)
        token = cached(prompt, keep=1).argmax(-1)
        for _ in range(n):
            token = cached(token, keep=1).argmax(-1)
    return best(run, 5) / n

for name, more in (("gpt2", []), ("llama3_8b", ["decoder.attention.n_kv_heads=2"])):
    model = tfkit.build(name, sets=SIZES + more)
    figures[f"{name}: step"] = step(model)
    figures[f"{name}: token"] = token(model)
figures["12 layers of width 16: token"] = token(tfkit.build("gpt2", sets=SMALL_SIZES), 48)
figures["build llama3_405b on meta"] = best(lambda: tfkit.build("llama3_405b", device="meta"), 3)
print(json.dumps(figures))
"""


def main() -> int:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=7, help="processes of each (default 7)")
    parser.add_argument("--json", action="store_true", help="print every round as JSON")
    options = parser.parse_args()
    root = options.checkout.resolve()
    python = root / ".venv/bin/python"
    if not python.exists():
        parser.error(f"{options.checkout} is not a checkout with a .venv")
    other = Contender("the other", script(PROBE, str(python)), root=root)
    both = [Contender("this checkout", script(PROBE)), other]
    race(both, options.rounds)
    figures = [name for name in both[0].runs[0] if name not in ("cpu", "rss")]
    if options.json:
        runs = {contender.name: contender.runs for contender in both}
        print(json.dumps({"date": str(date.today()), "machine": machine(), "runs": runs}, indent=2))
        return 0
    print(machine())
    print(f"\n{'time of this checkout over that of the other':46}{'best':>7}{'median':>8}   range")
    for name in figures:
        result = ratio(both[0].values(name), both[1].values(name))
        best = min(both[0].values(name)) * 1e3
        spread = f"{result.low:.2f} to {result.high:.2f}"
        print(f"  {name:30}{best:>11.2f} ms{result.of_minima:>8.3f}{result.median:>8.3f}   {spread}")
    return 0


if __name__ == "__main__":
    sys.exit(main())

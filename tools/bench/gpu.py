"""All measurements that need a GPU, in a few minutes: training and decoding at full size, in bfloat16, compiled.

    python tools/bench/gpu.py [--part gpt2 | gpt2_xl | llama3_8b | runs] [--json] [--rehearse]

Training: GPT-2 124M and 1.5B, forward, loss, backward and fused AdamW, in mixed precision, and the same step of
transformers' class. MFU is the fraction of the device's peak FLOP/s that the model uses. The FLOPs of a token are 6 for
each parameter outside the table of positions, plus 12 * layers * d_model * length for attention
(https://arxiv.org/abs/2204.02311, appendix B).
Decoding: Llama 3 8B, greedy, token by token. The fraction of the limit is the time to read the weights and the caches,
at the bandwidth of the data sheet, divided by the time of a token.
Runs: `tfkit train` on 1, 2, 4 and 8 GPUs, as available, with float8 if torchao is installed; see `runs.py`.

`--rehearse` runs everything at a small size on any device, as a test of the script; its figures are meaningless.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
from measure import accelerator, machine, seconds
from runs import runs, show
from torch.nn import functional as F

import tfkit
from tfkit.tools.common.memory_needs import cache_size

PEAKS = {"H200": (989e12, 4.8e12), "H100": (989e12, 3.35e12), "A100": (312e12, 2.04e12)}
"""Dense bfloat16 FLOP/s and bytes/s, from the data sheets of the SXM versions."""
TRAINING = {"gpt2": (32, 0.40), "gpt2_xl": (8, 0.48)}
"""Number of sequences of 1024 tokens in a step, and the target MFU."""
DECODING = {"llama3_8b": (1, 0.65)}
"""Batch size, and the target fraction of the limit."""
SMALL_SIZES = ["d_model=64", "vocab_size=128", "max_len=64", "decoder.n_layers=2", "decoder.attention.n_heads=4"]
STEPS, WARM_UP = 20, 5


def train(name: str, batch: int, *, rehearse: bool, device: str) -> dict[str, Any]:
    """Measure training steps of a model on random tokens."""
    sets = ["dropout=0", *([*SMALL_SIZES, "decoder.ffn.d_ff=256"] if rehearse else [])]
    model = tfkit.build(name, sets=sets, device=device)
    config: Any = model.meta["graph"].node("decoder").config
    length = 32 if rehearse else 1024
    text = torch.randint(128, (batch, length + 1), device=device)
    times = timed(training_step(model, text, tfkit.adamw(model, lr=1e-4)), device, rehearse)
    positions = model.get_submodule("embedding.position.table").weight.numel()
    parameters = sum(parameter.numel() for parameter in model.parameters()) - positions
    flops = batch * length * (6 * parameters + 12 * config.n_layers * config.d_model * length)
    return {"tokens_per_second": batch * length / min(times), "seconds": times, "flops": flops}


def training_step(model: Any, text: torch.Tensor, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return a compiled training step of a model that returns logits, or an output of transformers with logits."""

    def loss(tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        with torch.autocast(tokens.device.type, torch.bfloat16):
            output = model(tokens)
        logits = output if isinstance(output, torch.Tensor) else output.logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    compiled = torch.compile(loss, fullgraph=True)

    def step() -> None:
        compiled(text[:, :-1], text[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def train_peer(name: str, batch: int, *, rehearse: bool, device: str) -> list[float]:
    """Measure training steps of GPT-2 in transformers, of the same size and on as many tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"gpt2": (768, 12, 12), "gpt2_xl": (1600, 48, 25)}
    d_model, n_layers, n_heads = (64, 2, 4) if rehearse else sizes[name]
    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
    small = {"vocab_size": 128, "n_positions": 64, "bos_token_id": None, "eos_token_id": None} if rehearse else {}
    config = GPT2Config(n_embd=d_model, n_layer=n_layers, n_head=n_heads, **off, **small)
    model = GPT2LMHeadModel(config).to(device)
    text = torch.randint(128, (batch, 33 if rehearse else 1025), device=device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return timed(training_step(model, text, optimizer), device, rehearse)


def decode(name: str, batch: int, *, rehearse: bool, device: str) -> dict[str, Any]:
    """Measure single tokens after a prompt."""
    grouped = ["decoder.attention.n_kv_heads=2", "decoder.ffn.d_ff=64"]
    model = tfkit.build(
        name, sets=[*SMALL_SIZES, *grouped] if rehearse else [], device=device, dtype=torch.bfloat16
    ).eval()
    length = 64 if rehearse else 1024
    cached = tfkit.CachedModel(model, length=length, compile="reduce-overhead" if device == "cuda" else True)
    tokens = torch.randint(128, (batch, length // 2), device=device)
    size = cache_size(model.meta["graph"])
    assert size is not None
    latest = [cached(tokens, keep=1).argmax(dim=-1)]

    def step() -> None:
        latest[0] = cached(latest[0]).argmax(dim=-1)

    times = timed(step, device, rehearse)
    table = model.get_submodule("embedding.tokens").weight.nbytes  # a token reads one row of it
    weights = sum(parameter.nbytes for parameter in model.parameters()) - table
    return {
        "tokens_per_second": batch / min(times),
        "seconds": times,
        "bytes": weights + batch * length * size.per_token,
    }


def timed(step: Any, device: str, rehearse: bool) -> list[float]:
    """Measure the seconds of each step, after warm-up steps."""
    for _ in range(WARM_UP):
        step()
    return [seconds(step, device) for _ in range(3 if rehearse else STEPS)]


def clear(device: str) -> None:
    """Discard compiled code, and release the memory of the last model."""
    torch.compiler.reset()
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def verdict(result: dict[str, Any], peaks: tuple[float, float] | None, goal: float) -> str:
    """Describe the fraction of the device's limit that was reached."""
    if peaks is None:
        return "no data sheet of this device: no share"
    ideal = result["flops"] / peaks[0] if "flops" in result else result["bytes"] / peaks[1]
    what = "MFU" if "flops" in result else "of the bandwidth limit"
    best, middle = ideal / min(result["seconds"]), ideal / statistics.median(result["seconds"])
    return f"{best:.1%} {what} ({middle:.1%} in the median), goal {goal:.0%}: {'met' if best >= goal else 'MISSED'}"


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--part", choices=[*TRAINING, *DECODING, "runs"], help="one of them; all unless given")
    parser.add_argument("--rehearse", action="store_true", help="small sizes, on any device")
    parser.add_argument("--json", action="store_true", help="print every step as JSON")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.rehearse:
        sys.exit("not measured: there is no CUDA device here (--rehearse runs small sizes on the CPU)")
    name = accelerator() or ""
    peaks = next((peak for part, peak in PEAKS.items() if part in name), None)
    torch.set_float32_matmul_precision("high")
    results: dict[str, dict[str, Any]] = {}
    for model, (batch, goal) in (TRAINING | DECODING).items():
        if options.part in (None, model):
            run = train if model in TRAINING else decode
            result = run(model, batch, rehearse=options.rehearse, device=device)
            results[model] = result | {"batch": batch, "verdict": verdict(result, peaks, goal)}
            clear(device)
            if model in TRAINING:
                peer = train_peer(model, batch, rehearse=options.rehearse, device=device)
                results[model] |= {"transformers": peer, "ratio": min(result["seconds"]) / min(peer)}
                clear(device)
    together = runs(rehearse=options.rehearse, device=device) if options.part in (None, "runs") else {}
    if options.json:
        about = {"date": str(date.today()), "machine": machine(), "gpu": name, "torch": torch.__version__}
        print(json.dumps({**about, "results": results, "runs": together}, indent=2))
        return
    print(f"{machine()}, {name or 'no GPU'}, torch {torch.__version__}")
    for model, result in results.items():
        speed = f"{result['tokens_per_second']:,.0f} tokens/s at batch {result['batch']}"
        print(f"  {model:12}{speed:34}{result['verdict']}")
        if "ratio" in result:
            print(f"  {'':12}{result['ratio']:.3f} of the time of transformers' GPT2LMHeadModel")
    if together:
        show(together)


if __name__ == "__main__":
    main()

"""Compare the speed of the mixers of tfkit-recurrent with the torch code of transformers.

    python tools/bench/recurrent.py [--length 1024] [--rounds 3] [NAME ...]

CPU time on one thread, the best of several rounds in which both take turns: a forward of a mixer with 256 channels and
two sequences, then a forward with a backward for an eighth of the length, because the backward of some loops in
transformers would otherwise take minutes. Finally, a token of each mixer after 10 and after 10,000 tokens.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import tfkit
from tfkit.nn import Cache, Context

WIDTH, BATCH = 256, 2
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 4}
LINEAR = {"layer_types": ["linear_attention"], "rms_norm_eps": 1e-6}


@dataclass(frozen=True)
class Contest:
    """A mixer, and the class of transformers with the same sizes.

    Attributes:
        fields: fields of the mixer.
        module: module of the class in transformers.
        block: name of the class.
        config: name of the config class.
        sizes: fields of the config.
        arguments: additional arguments of the forward.
    """

    fields: Mapping[str, Any]
    module: str
    block: str
    config: str
    sizes: Mapping[str, Any]
    arguments: Callable[[int], Mapping[str, Any]] = field(default=lambda length: {})


CONTESTS = {
    "short_conv": Contest({}, "lfm2", "Lfm2ShortConv", "Lfm2Config", {**HEADS, "layer_types": ["conv"]}),
    "mamba": Contest({"d_inner": 512, "step_rank": 16}, "mamba", "MambaMixer", "MambaConfig", {}),
    "mamba2": Contest(
        {"n_heads": 8, "d_head": 64, "d_state": 128},
        "mamba2",
        "Mamba2Mixer",
        "Mamba2Config",
        {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 128},
    ),
    "gated_delta": Contest(
        {"n_heads": 8, "n_key_heads": 4, "d_key": 64, "d_value": 64},
        "qwen3_5",
        "Qwen3_5GatedDeltaNet",
        "Qwen3_5TextConfig",
        {
            **LINEAR,
            "linear_num_value_heads": 8,
            "linear_num_key_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
    "kda": Contest(
        {"n_heads": 4, "d_head": 64},
        "kimi_linear",
        "KimiLinearDeltaAttention",
        "KimiLinearConfig",
        {**LINEAR, **HEADS, "linear_num_heads": 4, "linear_head_dim": 64},
    ),
    "lightning": Contest(
        {"n_heads": 4, "d_head": 64},
        "minimax",
        "MiniMaxLightningAttention",
        "MiniMaxConfig",
        {**HEADS, "head_dim": 64, "layer_types": ["linear_attention"]},
        lambda length: {"position_embeddings": None, "attention_mask": None},
    ),
    "rg_lru": Contest(
        {"d_inner": 256, "n_blocks": 4},
        "recurrent_gemma",
        "RecurrentGemmaRecurrentBlock",
        "RecurrentGemmaConfig",
        {**HEADS, "lru_width": 256},
        lambda length: {
            "position_ids": torch.arange(length).expand(BATCH, -1),
            "attention_mask": None,
            "use_cache": False,
        },
    ),
    "rwkv4": Contest({"d_inner": 256}, "rwkv", "RwkvSelfAttention", "RwkvConfig", {}),
    "mlstm": Contest(
        {"n_heads": 4, "d_key": 32, "d_value": 64}, "xlstm", "xLSTMLayer", "xLSTMConfig", {"num_heads": 4}
    ),
}


def mixer_of(name: str) -> tuple[Any, nn.Module]:
    """Build a mixer, and return it with its config."""
    decoder = {"block": "decoder", "n_layers": 1, "attention": None, "ffn": None, "final_norm": False}
    spec = {
        "tfkit": 1,
        "name": name,
        "d_model": WIDTH,
        "inputs": {"x": {"type": "features", "width": WIDTH}},
        "graph": {"decoder": {**decoder, "mixer": {"kind": name, **CONTESTS[name].fields}}},
    }
    model = tfkit.build(tfkit.load(spec))
    return model.meta["components"]["decoder.layers.0.mixer"], model.get_submodule("decoder.layers.0.mixer").eval()


def block_of(contest: Contest) -> nn.Module:
    """Build the class of transformers, with small random weights."""
    module = importlib.import_module(f"transformers.models.{contest.module}.modeling_{contest.module}")
    config = getattr(transformers, contest.config)(hidden_size=WIDTH, num_hidden_layers=1, **contest.sizes)
    number = [] if contest.module == "xlstm" else [0]
    block: nn.Module = getattr(module, contest.block)(config, *number).eval()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(0.0, 0.05)
    return block


def seconds(*runs: Callable[[], object], rounds: int) -> list[float]:
    """Return the minimum CPU time of each run; the runs take turns."""
    best = [float("inf")] * len(runs)
    for number in range(rounds + 1):
        for index, run in enumerate(runs):
            start = time.process_time()
            run()
            if number:  # the first round warms up
                best[index] = min(best[index], time.process_time() - start)
    return best


def runs(mixer: nn.Module, block: nn.Module, contest: Contest, length: int) -> list[Callable[[], Tensor]]:
    """Return the forwards of both contenders."""
    x, more = torch.randn(BATCH, length, WIDTH), contest.arguments(length)
    return [lambda: mixer(x, Context(None, None, None)), lambda: block(x, **more)]


def trained(run: Callable[[], Tensor]) -> Callable[[], object]:
    """Return a run with its backward."""

    def step() -> None:
        y = run()
        (y[0] if isinstance(y, tuple) else y).sum().backward()

    return step


def token_after(name: str, count: int, rounds: int) -> float:
    """Return the CPU time of one token after `count` tokens."""
    config, mixer = mixer_of(name)
    states = [torch.zeros(1, *state.shape(0)) for state in config.cached]
    context = Context(None, None, None, Cache(states, torch.zeros(0, dtype=torch.long), 0, 0))
    with torch.inference_mode():
        mixer(torch.randn(1, count, WIDTH), context)
        x = torch.randn(1, 1, WIDTH)
        return seconds(lambda: [mixer(x, context) for _ in range(50)], rounds=rounds)[0] / 50


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", default=list(CONTESTS))
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    print(f"{'mixer':12}{'forward, ms':>24}{'ratio':>8}{'and backward, ms':>24}{'ratio':>8}", flush=True)
    for name in arguments.names:
        torch.manual_seed(0)
        contest = CONTESTS[name]
        (_, mixer), block = mixer_of(name), block_of(contest)
        with torch.no_grad():
            forward = seconds(*runs(mixer, block, contest, arguments.length), rounds=arguments.rounds)
        step = seconds(*map(trained, runs(mixer, block, contest, arguments.length // 8)), rounds=arguments.rounds)
        texts = [f"{1e3 * a:.1f} to {1e3 * b:.1f}" for a, b in (forward, step)]
        ratios = [f"{a / b:.2f}" for a, b in (forward, step)]
        print(f"{name:12}{texts[0]:>24}{ratios[0]:>8}{texts[1]:>24}{ratios[1]:>8}", flush=True)
    print("\na token after 10 and after 10,000 tokens, ms")
    for name in arguments.names:
        early, late = (1e3 * token_after(name, count, arguments.rounds) for count in (10, 10_000))
        print(f"{name:12}{early:.3f} and {late:.3f}", flush=True)


if __name__ == "__main__":
    main()

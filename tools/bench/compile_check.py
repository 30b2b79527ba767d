"""Check that torch.compile captures each model as a single graph, with a single compilation for all lengths.

    python tools/bench/compile_check.py [--json]

Each model is built at a reduced size, compiled with dynamic shapes and a backend that only counts, and called at
several lengths and batch sizes, with and without a padding mask. Expected are no graph breaks and one compilation.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass

import torch
from torch import Tensor, fx

import tfkit

SHARED = ["d_model=32", "vocab_size=64"]
MODELS = {
    "gpt2": ["decoder.n_layers=2", "decoder.attention.n_heads=4", "decoder.ffn.d_ff=64"],
    "llama3_8b": [
        "decoder.n_layers=2", "decoder.attention.n_heads=4", "decoder.attention.n_kv_heads=2", "decoder.ffn.d_ff=64",
    ],
    "t5_small": [
        f"{stack}.{key}"
        for stack in ("encoder", "decoder")
        for key in ("n_layers=2", "attention.n_heads=4", "ffn.d_ff=64")
    ],
    "vaswani_base": [
        f"{stack}.{key}"
        for stack in ("encoder", "decoder")
        for key in ("n_layers=2", "attention.n_heads=4", "ffn.d_ff=64")
    ],
}  # fmt: skip
SHAPES = [(2, 8), (2, 9), (3, 13), (2, 32), (5, 21), (4, 64)]


@dataclass(frozen=True)
class Result:
    """The counts for one model and its calls."""

    model: str
    masked: bool
    calls: int
    graph_breaks: int
    graphs: int
    """Number of compilations; a single compilation covers all shapes."""
    largest_difference: float
    """The largest difference from the model that is not compiled."""

    @property
    def good(self) -> bool:
        """True for a single full graph with the same numbers."""
        return self.graph_breaks == 0 and self.graphs == 1 and self.largest_difference < 1e-5


def check(name: str, sets: list[str], *, masked: bool) -> Result:
    """Compile one model and call it with every shape."""
    graph = tfkit.load(name, sets=[*SHARED, *sets])
    model = tfkit.build(graph).eval()
    torch._dynamo.reset()
    counted: list[fx.GraphModule] = []

    def backend(captured: fx.GraphModule, examples: list[Tensor]) -> fx.GraphModule:
        counted.append(captured)
        return captured

    compiled = torch.compile(model, backend=backend, dynamic=True)
    largest = 0.0
    explained = torch._dynamo.explain(model)(**inputs(graph, *SHAPES[0], masked=masked))
    torch._dynamo.reset()
    for batch, length in SHAPES:
        batch_inputs = inputs(graph, batch, length, masked=masked)
        with torch.no_grad():
            largest = max(largest, (compiled(**batch_inputs) - model(**batch_inputs)).abs().max().item())
    return Result(name, masked, len(SHAPES), explained.graph_break_count, len(counted), largest)


def inputs(graph: tfkit.Graph, batch: int, length: int, *, masked: bool) -> dict[str, Tensor]:
    """Return random tokens for every input; an encoder's and a decoder's sequences differ in length."""
    torch.manual_seed(length)
    tokens: dict[str, Tensor] = {}
    for i, name in enumerate(graph.inputs):
        tokens[name] = torch.randint(64, (batch, length + 3 * i))
        if masked:
            tokens[f"{name}_mask"] = torch.arange(length + 3 * i) < torch.randint(4, length, (batch, 1))
    return tokens


def main() -> None:
    """Check the models, and print the counts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    options = parser.parse_args()
    results = [check(name, sets, masked=masked) for name, sets in MODELS.items() for masked in (False, True)]
    if options.json:
        print(json.dumps([{**asdict(result), "good": result.good} for result in results], indent=2))
    else:
        print(f"torch {torch.__version__}, dynamic shapes, {len(SHAPES)} shapes each")
        print(f"  {'model':16}{'mask':>6}{'graph breaks':>14}{'compilations':>14}{'difference':>13}")
        for result in results:
            mask = "yes" if result.masked else "no"
            print(
                f"  {result.model:16}{mask:>6}{result.graph_breaks:>14}{result.graphs:>14}"
                f"{result.largest_difference:>13.1e}"
            )
    sys.exit(not all(result.good for result in results))


if __name__ == "__main__":
    main()

"""A contender of `train_loop.py`, in a separate process: a run in which each step waits for its turn.

`tfkit` is `tfkit train` with its record. `loop` is a handwritten loop around tfkit's model, and `hand` a handwritten
loop around a handwritten model.
"""

from __future__ import annotations

import json
import resource
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import tfkit
from tfkit.run.checked_run import Run, load_run
from tfkit.run.contract import Callback, Training

RUN = "minigpt_relu"
SETS = ["eval=null", "checkpoint={every: 1000000}", "steps=1000000"]


class Turns(Callback):
    """Answers each line of standard input with the CPU time of a step, its loss, and the peak memory."""

    def __init__(self) -> None:
        self._answers = sys.stdout
        sys.stdout = sys.stderr

    def wait(self) -> None:
        """Wait for the next turn."""
        if not sys.stdin.readline():
            raise SystemExit
        self._begin = time.process_time()

    def taken(self, loss: float) -> None:
        """Answer with the results of a step, and wait for the next turn."""
        seconds = time.process_time() - self._begin
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
        print(json.dumps({"seconds": seconds, "loss": loss, "peak": peak}), file=self._answers, flush=True)
        self.wait()

    def on_start(self, training: Training) -> None:
        self.wait()

    def on_step(self, training: Training, numbers: Mapping[str, float]) -> None:
        self.taken(numbers["loss"])


def by_tfkit(run: Run, turns: Turns) -> None:
    """Run the loop of `tfkit train`."""
    from tfkit.run.training.loop import Trainer
    from tfkit.tools.train.record import RunFolder, bits_of

    with tempfile.TemporaryDirectory() as folder:
        Trainer(run, RunFolder(Path(folder), run, bits_of(run, 1), {}), watchers=[turns]).train()


def by_hand(run: Run, model: nn.Module, turns: Turns) -> None:
    """Run a plain training loop."""
    windows = run.data.examples("train", "sequential")
    tokens = torch.from_numpy(windows.batch(np.arange(len(windows) - 1)).inputs["tokens"]).flatten()
    sequences, length = run.config.batch.sequences, run.data.length
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.01, fused=True)
    turns.wait()
    while True:
        starts = torch.randint(len(tokens) - length, (sequences,)).tolist()
        inputs = torch.stack([tokens[start : start + length] for start in starts])
        targets = torch.stack([tokens[start + 1 : start + 1 + length] for start in starts])
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        turns.taken(loss.item())


class Layer(nn.Module):
    """A pre-LN layer with ReLU."""

    def __init__(self, width: int, n_heads: int, d_ff: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv, self.output = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, d_ff, bias=False), nn.Linear(d_ff, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        b, t, m = x.shape
        projections = self.qkv(self.norms[0](x)).split(m, 2)
        q, k, v = (tensor.view(b, t, self.n_heads, -1).transpose(1, 2) for tensor in projections)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(mixed.transpose(1, 2).reshape(b, t, m))
        return x + self.down(F.relu(self.up(self.norms[1](x))))


class Model(nn.Module):
    """The model of the run in plain PyTorch."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, 96), nn.Embedding(128, 96)
        self.layers = nn.Sequential(*(Layer(96, 8, 384) for _ in range(8)))
        self.norm, self.head = nn.LayerNorm(96), nn.Linear(96, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        return self.head(self.norm(self.layers(x)))


def main() -> None:
    """Serve turns as the contender that the command line names."""
    torch.set_num_threads(1)
    run, turns = load_run(RUN, tfkit.load_plugins(), sets=SETS), Turns()
    if sys.argv[1] == "tfkit":
        by_tfkit(run, turns)
        return
    model = tfkit.build(run.graph) if sys.argv[1] == "loop" else Model(run.data.vocab_size)
    assert sum(weight.numel() for weight in model.parameters()) == run.graph.spec.model.parameters
    by_hand(run, model, turns)


if __name__ == "__main__":
    main()

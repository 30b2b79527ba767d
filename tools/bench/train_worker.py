"""A contender of `train_step.py`, in a separate process: builds a model, and takes a step on each request."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from measure import seconds
from peers import Shape, peer
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from worker import Answer, serve


class Trainer:
    """A model, its optimizer and one batch.

    Args:
        name: the contender; tfkit writes its weights and logits to `folder`, and all other contenders read them.
        shape: sizes of the model and of the batch.
        folder: the folder for the exchange of weights and logits.
        compiled: True to compile forward and loss as a single graph, without graph breaks.
        device: the device of the steps.
    """

    def __init__(self, name: str, shape: Shape, folder: Path, *, compiled: bool, device: str) -> None:
        self.peer, self.shape, self.device = peer(name), shape, device
        text = torch.randint(shape.vocab_size, (shape.batch, shape.length + 1), generator=torch.Generator())
        tokens, targets = text[:, :-1].contiguous(), text[:, 1:].flatten()
        state = None if name == "tfkit" else torch.load(folder / "weights.pt")
        model = self.peer.build(shape, state)
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        with torch.no_grad():
            logits = self.peer.logits(model, tokens)
        if state is None:
            torch.save(model.state_dict(), folder / "weights.pt")
            torch.save(logits, folder / "logits.pt")
        self.difference = (logits - torch.load(folder / "logits.pt")).abs().max().item()
        self.model, self.tokens, self.targets = model.to(device), tokens.to(device), targets.to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.forward = torch.compile(self.loss, fullgraph=True) if compiled else self.loss
        self.last = torch.zeros(())

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Return the mean next-token loss."""
        return F.cross_entropy(self.peer.logits(self.model, tokens).flatten(0, 1), targets)

    def step(self) -> None:
        """Run forward and backward, and update the weights."""
        loss = self.forward(self.tokens, self.targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.last = loss.detach()

    def operators(self) -> dict[str, tuple[int, float]]:
        """Count the calls and milliseconds of each operator in a step, without the operators that it calls."""
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        return {event.key: (event.count, event.self_cpu_time_total / 1000) for event in profiler.key_averages()}


class Service:
    """The requests of the coordinator."""

    trainer: Trainer

    def __call__(self, what: str, details: Answer) -> Answer:
        return getattr(self, what)(**details)

    def build(self, name: str, shape: Answer, folder: str, compiled: bool, device: str) -> Answer:
        """Build the contender; return its description."""
        self.trainer = trainer = Trainer(name, Shape(**shape), Path(folder), compiled=compiled, device=device)
        return {
            "parameters": trainer.parameters,
            "difference": trainer.difference,
            "differs": trainer.peer.differs.get(trainer.shape.family),
            "versions": {package: version(package) for package in ("torch", *trainer.peer.packages)},
        }

    def step(self) -> Answer:
        """Take a step; return its duration, and the loss before it."""
        duration = seconds(self.trainer.step, self.trainer.device)
        return {"seconds": duration, "loss": self.trainer.last.item()}

    def operators(self) -> Answer:
        """Take a step under the profiler."""
        return {"operators": self.trainer.operators()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Service())

"""litgpt's decoder for `decode.py`, in a separate process and environment."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import torch
from measure import per_token
from peers import Shape, peer
from torch import Tensor
from worker import Answer, serve


class Decoder:
    """A model with its cache, in the shortest loop."""

    def __init__(self, shape: Shape, folder: Path) -> None:
        self.prompt: Tensor = torch.load(folder / "prompt.pt")
        self.model = peer("litgpt").build(shape, torch.load(folder / "weights.pt")).eval()
        self.model.set_kv_cache(shape.batch)

    def loop(self, n: int) -> Tensor:
        """Write `n` tokens as litgpt's `generate` does: `input_pos_maxp1` cuts the cache to the part that is read."""
        t = self.prompt.size(1)
        logits = self.model(self.prompt, torch.arange(t), input_pos_maxp1=t)
        tokens = [logits[:, -1:].argmax(dim=-1)]
        for position in range(t, t + n - 1):
            logits = self.model(tokens[-1], torch.tensor([position]), input_pos_maxp1=position + 1)
            tokens.append(logits[:, -1:].argmax(dim=-1))
        return torch.cat(tokens, dim=1)


class Service:
    """The requests of the coordinator."""

    decoder: Decoder

    def __call__(self, what: str, details: Answer) -> Answer:
        with torch.inference_mode():
            return getattr(self, what)(**details)

    def build(self, shape: Answer, folder: str, n: int) -> Answer:
        """Build the model; return the tokens that it writes."""
        self.decoder = Decoder(Shape(**shape), Path(folder))
        versions = {package: version(package) for package in ("torch", *peer("litgpt").packages)}
        return {"tokens": self.decoder.loop(n).tolist(), "versions": versions}

    def seconds(self, n: int) -> Answer:
        """Measure the seconds of a token."""
        return {"seconds": per_token(self.decoder.loop, n, "cpu")()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(Service())

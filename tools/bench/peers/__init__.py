"""The contenders: one file per library, imported on request; each builds the same model of a given shape."""

from __future__ import annotations

from importlib import import_module

from peers.peer import Peer
from peers.shape import Family, Shape

__all__ = ["FILES", "Family", "Peer", "Shape", "peer"]

FILES = {
    "tfkit": "tfkit",
    "by hand": "by_hand",
    "transformers": "transformers",
    "litgpt": "litgpt",
    "x-transformers": "x_transformers",
    "torchtune": "torchtune",
    "torch.nn": "torch_nn",
}


def peer(name: str) -> Peer:
    """Return the contender of that name; raise `ImportError` if its library is not installed."""
    return import_module(f"peers.{FILES[name]}").PEER

"""The contenders: a file for each library, imported on request. All build the same model of a given shape."""

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
    """Return a contender by its name. Raise `ImportError` if its library is not installed."""
    return import_module(f"peers.{FILES[name]}").PEER

"""Helpers that apply a pattern in both directions."""

from __future__ import annotations

import torch

from tfkit.checkpoint.pattern import Pattern

PER_HEAD = "(h [q k v] d) i -> [(h q d) (h k d) (h v d)] i"


def apply(text, *tensors, **sizes):
    """Both directions: what comes back is what went in, and the shapes are those that were foretold."""
    pattern = Pattern.parse(text)
    results = pattern.apply(tensors, sizes)
    assert pattern.shapes([t.shape for t in tensors], sizes) == [tuple(t.shape) for t in results]
    back = pattern.inverse().apply(results, sizes)
    assert len(back) == len(tensors)
    assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True))
    return results


def count(*shape):
    return torch.arange(torch.Size(shape).numel()).view(shape)

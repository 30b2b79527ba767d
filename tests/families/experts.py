"""Mixtures of experts and latent attention, by plugins: small, with everything switched on that a family can do."""

from __future__ import annotations

from .case import Case

EXPERTS: dict[str, Case] = {}

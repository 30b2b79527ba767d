"""Encoders with their masked-LM heads: small, with everything switched on that a family can do."""

from __future__ import annotations

from .case import Case

ENCODERS: dict[str, Case] = {}

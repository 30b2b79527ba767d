"""Encoder-decoders: small, with everything switched on that a family can do."""

from __future__ import annotations

from .case import Case

SEQ2SEQ: dict[str, Case] = {}

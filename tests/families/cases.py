"""Every family by name."""

from __future__ import annotations

from .case import Case
from .decoders import DECODERS
from .encoders import ENCODERS
from .experts import EXPERTS
from .llama_kin import LLAMA_KIN
from .seq2seq import SEQ2SEQ

CASES: dict[str, Case] = {**DECODERS, **LLAMA_KIN, **ENCODERS, **SEQ2SEQ, **EXPERTS}

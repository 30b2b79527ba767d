"""Every family by name."""

from __future__ import annotations

from .case import Case
from .decoders import DECODERS
from .encoders import ENCODERS
from .experts import EXPERTS
from .latent import LATENT_KIN
from .llama_kin import LLAMA_KIN
from .mixed_experts import MIXED_EXPERTS
from .seq2seq import SEQ2SEQ

CASES: dict[str, Case] = {
    **DECODERS,
    **LLAMA_KIN,
    **ENCODERS,
    **SEQ2SEQ,
    **EXPERTS,
    **MIXED_EXPERTS,
    **LATENT_KIN,
}

"""Every family by name."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import takewhile

from .case import Case
from .decoders import DECODERS
from .encoders import ENCODERS
from .experts import EXPERTS
from .latent import LATENT_KIN
from .llama_kin import LLAMA_KIN
from .mixed_experts import MIXED_EXPERTS
from .recurrent import RECURRENT
from .seq2seq import SEQ2SEQ
from .streams import STREAMS

CASES: dict[str, Case] = {
    **DECODERS,
    **LLAMA_KIN,
    **ENCODERS,
    **SEQ2SEQ,
    **EXPERTS,
    **MIXED_EXPERTS,
    **LATENT_KIN,
    **RECURRENT,
    **STREAMS,
}


def earlier(name: str) -> Iterator[str]:
    """The cases before this one that are of its family: what they have tried need not be tried again."""
    family = (CASES[name].model_type, CASES[name].family)
    before = takewhile(lambda other: other != name, CASES)
    return (other for other in before if (CASES[other].model_type, CASES[other].family) == family)


QUICK_CASES = frozenset(
    """
    bart bert bloom deberta_v3 deepseek_v3 falcon_40b gemma2 gpt2 gpt_neox gpt_oss llama llama_dynamic llama_linear
    llama_llama3 llama_yarn_all ministral3 mistral mixtral modernbert mpt olmo3 t5 t5gemma
    """.split()  # noqa: SIM905
)
"""The families that most people know; and some of those of which each has two words of a spec or of a config.json
(kinds, keys, rules of fields, patterns of tensors) that none of the others has."""

"""Random valid configs have the meaning of transformers, or name a mechanism that the language lacks."""

from __future__ import annotations

from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from ..sampling import chosen
from .case import Case
from .cases import CASES
from .generated import outcome
from .random_configs import drawn

FAMILIES = """
    llama mistral qwen2 qwen3 gemma gemma2 phi phi3 gpt2 gpt_neox gptj bloom opt falcon cohere2 olmo2 granite
    stablelm starcoder2 nemotron glm4 smollm3 bert roberta electra distilbert modernbert t5 bart mixtral qwen3_moe
    deepseek_v2
""".split()  # noqa: SIM905
COUNT = 4
UNREAD = {"bert": "cls.predictions.bias", "roberta": "lm_head.bias", "bart": "model.shared.weight"}
"""Parameters that the class has and does not use if the head is untied."""
REFUSED = {
    "*`scale_attn_by_inverse_layer_idx` must be `false`*": "a scale of attention for each layer",
    "bloom `slow_but_exact` must be `false`*": "biases that are left out in a part of the layer",
    "qwen3_moe `use_sliding_window` must be `false`*": "windows in a family whose files list no layer types",
    "* `partial_rotary_factor` rotates no pair of channels*": "a rotation of less than two channels",
    "* an odd number of rotated channels *: `partial_rotary_factor`*": "scaled frequencies for an odd width",
}
"""Refusals, with `*`, and the mechanism that the language lacks."""


def untied(name: str, case: Case) -> Case:
    """Return a case without the parameters that its class does not use."""
    if name not in UNREAD or case.config.get("tie_word_embeddings", True):
        return case
    return replace(case, uncounted={**case.uncounted, UNREAD[name]: "not read"}, leaves_out=True)


def is_accepted(name: str, why: str) -> bool:
    """Return True if a refusal is in the table."""
    return any(fnmatchcase(f"{name} {why}", pattern) for pattern in REFUSED)


@pytest.mark.parametrize(
    ("name", "number"),
    chosen([(name, number) for name in FAMILIES for number in range(COUNT)], {("llama", 0)}),
)
def test_a_random_config_is_read_or_refused(name: str, number: int, tmp_path: Path) -> None:
    case, changed = drawn(CASES[name], f"{name} {number}")
    assert len(changed) > 3
    verdict, why = outcome(untied(name, case), tmp_path / "drawn")
    if verdict == "refused":
        assert is_accepted(name, why), f"{why}: {changed}"
        field = next((field for field in changed if f"`{field}" in why), "rope_parameters")
        config = {key: value for key, value in case.config.items() if key != field}
        verdict, why = outcome(untied(name, replace(case, config=config)), tmp_path / "rest")
    assert verdict == "passed" or (verdict == "refused" and is_accepted(name, why)), f"{why}: {changed}"

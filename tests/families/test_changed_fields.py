"""No field of a config.json is passed over in silence, and none is followed that transformers does not read."""

from __future__ import annotations

from pathlib import Path

import pytest

from ..sampling import chosen
from .cases import CASES
from .changed_fields import outcomes

QUICK = {"gpt2"}
REPAIRED = {name for name, case in CASES.items() if case.repair is not None}
"""Their class is wrong and repaired for one config: another may need another repair."""

TWO_THETAS = {"dbrx"}
"""Its published files have attn_config.rope_theta, and their class reads that of rope_parameters alone."""
EXCEPT = {
    ("t5gemma", "vocab_size=122"): "their tables keep 61 rows, and the test draws ids by this field",
    ("dots1", "topk_group=0"): "experts of no group: theirs takes some of them all the same",
}

OPEN = {
    "cohere2_listed",
    "cohere2_moe_bare",
    "cohere2_moe_sum",
    "cohere_qk_norm",
    "deepseek_v3_bare",
    "ernie",
    "exaone_moe_mixed",
    "falcon",
    "falcon2_11b",
    "falcon_40b",
    "glm4_moe_bare",
    "minimax_m2",
    "mpnet",
}
"""Cases with a change that gives other logits, or an error of the test, and whose cause is not found yet."""


@pytest.mark.parametrize("name", chosen(sorted({*CASES} - REPAIRED - TWO_THETAS), QUICK))
def test_a_changed_field_is_read_or_refused(name: str, tmp_path: Path) -> None:
    if name in OPEN:
        pytest.xfail("a change is not understood yet")
    found = outcomes(CASES[name], tmp_path)
    wrong = {change: why for change, (verdict, why) in found.items() if verdict in ("wrong", "crashed")}
    assert {change: why for change, why in wrong.items() if (name, change) not in EXCEPT} == {}
    assert sum(verdict == "equal" for verdict, _ in found.values()) > 5

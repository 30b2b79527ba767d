"""Parts of the code that ejected folders run in transformers."""

from __future__ import annotations

import ast

import pytest
from torch.nn import functional as F

from tfkit.nn.forward_text import Operation
from tfkit.tools.eject.remote_code.attention import _Calls
from tfkit.tools.eject.remote_code.separate import _looks_up


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("q, k, v", "self, q, k, v"),
        ("q, k, v, m, 0.25, True", "self, q, k, v, mask=m, dropout=0.25, causal=True"),
        ("q, k, v, scale=0.3, attn_mask=m", "self, q, k, v, mask=m, scale=0.3"),
    ],
)
def test_a_call_of_attention_keeps_its_arguments(arguments: str, expected: str) -> None:
    call = ast.parse(f"F.scaled_dot_product_attention({arguments})", mode="eval")
    assert ast.unparse(_Calls(causal=False).visit(call)) == f"chosen_attention({expected})"


def test_a_lookup_in_a_tied_table_is_that_of_tokens() -> None:
    lookup, call = Operation("call_function", "x", F.embedding), Operation("call_module", "x", "positions")
    assert [_looks_up(lookup, child) for child in ("tokens", "positions")] == [True, False]
    assert [_looks_up(call, child) for child in ("tokens", "positions")] == [False, True]
    assert not _looks_up(Operation("call_function", "x", F.relu), "tokens")

from __future__ import annotations

from typing import Any

import torch

import tfkit
from tfkit.nn import is_token
from tfkit.tools.code import forward_code
from tfkit.tools.inputs import random_inputs


def test_the_code_is_the_forward(captions: tfkit.Graph) -> None:
    """Run as a method, the printed code gives what the model gives."""
    model = tfkit.build(captions).eval()
    code = forward_code(model)
    scope: dict[str, Any] = {"Tensor": torch.Tensor, "torch": torch, "is_token": is_token}
    exec(code, scope)
    inputs = random_inputs(captions)
    assert torch.equal(scope["forward"](model, **inputs), model(**inputs))


def test_it_reads_as_written_by_hand(small: tfkit.Graph) -> None:
    assert forward_code(tfkit.build(small, device="meta")).splitlines() == [
        "def forward(self, tokens: Tensor, tokens_mask: Tensor | None = None):",
        "    tokens_is_token = is_token(tokens_mask, 'tokens_mask')",
        "    embedding = self.embedding(tokens, mask=tokens_is_token)",
        "    decoder = self.decoder(embedding, mask=tokens_is_token)",
        "    logits = self.logits(decoder, tie=self.embedding.tokens.weight)",
        "    return logits",
    ]


def test_long_lines_are_broken() -> None:
    code = forward_code(tfkit.build("vaswani_base", device="meta"))
    assert max(map(len, code.splitlines())) <= 80
    assert "NoneType" not in code
    assert " = None" in code
    assert "; " not in code

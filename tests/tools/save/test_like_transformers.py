"""Folders with the sizes and weights of models of transformers: arguments, masks, caches and outputs are equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tfkit.tools.save.save import save

from .test_opened_in_transformers import opened

SIZES = "name: small\nparameters: null\nvocab_size: 50\nd_model: 32\nmax_len: 24\n"
LLAMA = f"""tfkit: 1
extends: llama3_8b
{SIZES}graph: {{decoder: {{n_layers: 2, attention: {{n_heads: 4, n_kv_heads: 2}}, ffn: {{d_ff: 48}}}}}}
"""
GPT2 = f"""tfkit: 1
extends: gpt2
{SIZES}graph: {{decoder: {{n_layers: 2, attention: {{n_heads: 4}}, ffn: {{d_ff: 48}}}}}}
"""


class Pair(NamedTuple):
    """A folder's model, and the model of transformers with equal weights."""

    ours: Any
    theirs: Any


def pair(spec: str, folder: Path) -> Pair:
    """Open the folder of a model, and the folder of its family."""
    code = folder / f"code_{folder.name}"  # the name of a package
    code.mkdir()
    model, ours = opened(spec, code)
    save(model, folder / "family", layout="huggingface")
    return Pair(ours, AutoModelForCausalLM.from_pretrained(folder / "family").eval())


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def models(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return pair({"llama": LLAMA, "gpt2": GPT2}[request.param], tmp_path_factory.mktemp(request.param))


def ids(rows: int = 2, columns: int = 9, seed: int = 0) -> Tensor:
    return torch.randint(1, 50, (rows, columns), generator=torch.Generator().manual_seed(seed))


def close(value: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(value, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))


@torch.no_grad()
def test_hidden_states_and_attentions(models: Pair) -> None:
    outputs = []
    for model in models:
        model.set_attn_implementation("eager")
        outputs.append(model(ids(), output_hidden_states=True, output_attentions=True))
        model.set_attn_implementation("sdpa")
    for name in ("hidden_states", "attentions"):
        values, expected = (output[name] for output in outputs)
        assert len(values) == len(expected) == 2 + (name == "hidden_states")
        for pair_ in zip(values, expected, strict=True):
            close(*pair_)


@torch.no_grad()
@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"output_attentions": True}, ValueError, r'call set_attn_implementation\("eager"\)'),
        ({"output_router_logits": True}, ValueError, "output_router_logits cannot be used: no layer returns router"),
        ({"atention_mask": ids(), "past": 3}, TypeError, "no keyword arguments named atention_mask, past"),
    ],
)
def test_keywords_without_effect_are_errors(
    models: Pair, arguments: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        models.ours(ids(), **arguments)
    close(models.ours(ids(), cache_params=None, output_attentions=False).logits, models.theirs(ids()).logits)

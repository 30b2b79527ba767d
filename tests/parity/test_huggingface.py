"""Logits equal those of Hugging Face's models: shipped specs at small sizes, every parameter drawn at random."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import Tensor, nn

import tfkit

from .decoders import DECODERS
from .encoders import ENCODERS
from .family import Family
from .further import FURTHER
from .llama_kin import LLAMA_KIN
from .mapping import renamed

BATCH = 3


def reference(family: Family) -> nn.Module:
    """Their model in eval mode, every parameter drawn again: norms and biases too."""
    cls = getattr(transformers, family.model)
    config = cls.config_class(**family.config)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    model = cls(config).eval()
    if family.untied_head:
        model.lm_head.weight = nn.Parameter(torch.empty_like(model.lm_head.weight))
    with torch.no_grad():
        for name, parameter in parameters(model, family).items():
            norm = parameter.dim() == 1 and name.endswith("weight")
            parameter.normal_(family.norm_mean if norm else 0.0, family.std)
    return model


def parameters(model: nn.Module, family: Family) -> dict[str, Tensor]:
    return {name: p for name, p in model.named_parameters() if name not in family.ignored}


def port(theirs: nn.Module, family: Family) -> nn.Module:
    """Our model with the parameters of theirs."""
    sets = [f"{path}={value}" for path, value in family.sets.items()]
    shipped = family.spec.isidentifier()
    graph = tfkit.load(family.spec, sets=sets) if shipped else tfkit.loads(family.spec, sets=sets)
    ours = tfkit.build(graph).eval()
    ours.load_state_dict(renamed(ours.state_dict(), parameters(theirs, family), family.weights))
    return ours


def tokens(side: str, length: int, first: int) -> Tensor:
    """Which positions of three sequences are tokens, bool [b, length]; one sequence is full."""
    lengths = torch.tensor([[length - 2], [length], [first]])
    positions = torch.arange(length)
    if side == "none":
        return torch.ones(BATCH, length, dtype=torch.bool)
    return positions < lengths if side == "right" else positions >= length - lengths


CASES = [
    pytest.param(family, side, id=f"{name}-{side}")
    for name, family in {**DECODERS, **ENCODERS, **LLAMA_KIN, **FURTHER}.items()
    for side in ("none", "right", "left")
]


@pytest.mark.parametrize(("family", "side"), CASES)
def test_logits_equal_hugging_face(family: Family, side: str) -> None:
    theirs = reference(family)
    ours = port(theirs, family)
    real, expected, found = run(family, theirs, ours, side)
    assert expected[real].std() > 0.2, "outputs so small that everything is near"
    torch.testing.assert_close(found[real], expected[real], rtol=1e-5, atol=1e-5)


@torch.no_grad()
def run(family: Family, theirs: nn.Module, ours: nn.Module, side: str) -> tuple[Tensor, Tensor, Tensor]:
    """Which outputs count, theirs and ours."""
    inputs = [torch.randint(2, 61, (BATCH, family.length))]
    masks = [tokens(side, family.length, 3)]
    extra: dict[str, Tensor] = {}
    if family.kind == "seq2seq":
        inputs.append(torch.randint(2, 61, (BATCH, family.length - 2)))
        masks.append(tokens(side, family.length - 2, 1))
    if family.token_types:
        extra["token_types"] = torch.randint(0, 2, inputs[0].shape)
    found = ours(*inputs, **extra) if side == "none" else ours(*inputs, *extra.values(), *masks)
    if side == "left" and family.counts_padding:
        return masks[-1], alone(theirs, inputs, masks), found
    given = {"token_type_ids": extra["token_types"]} if family.token_types else {}
    if family.kind == "seq2seq":
        given["decoder_input_ids"] = inputs[1]
    if side != "none":
        given["attention_mask"] = masks[0].long()
        if family.kind == "seq2seq":
            given["decoder_attention_mask"] = masks[1].long()
        if family.position_ids:
            given["position_ids"] = (masks[0].long().cumsum(dim=1) - 1).clamp(min=0)
    return masks[-1], theirs(inputs[0], **given).logits, found


def alone(theirs: nn.Module, inputs: list[Tensor], masks: list[Tensor]) -> Tensor:
    """Their logits for each pair of sequences by itself, without padding, put back on the right."""
    logits = torch.zeros(*inputs[1].shape, 61)
    for row in range(BATCH):
        source, target = (ids[row, mask[row]][None] for ids, mask in zip(inputs, masks, strict=True))
        logits[row, masks[1][row]] = theirs(source, decoder_input_ids=target).logits[0]
    return logits


@torch.no_grad()
def test_without_token_types_all_are_of_the_first_type() -> None:
    family = ENCODERS["bert_base"]
    theirs = reference(family)
    ids = torch.randint(2, 61, (BATCH, family.length))
    torch.testing.assert_close(port(theirs, family)(ids), theirs(ids).logits, rtol=1e-5, atol=1e-5)

"""Every mixer against the class of transformers, in pieces, under padding, in other types, and scripted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit

from .mixers import PAIRS, PLUGINS, WIDTH, built, context, slot_of, states

LENGTH = 90
"""Longer than a chunk of any recurrence."""
PAIR_NAMES = [pytest.param(name, marks=pytest.mark.slow) if " " in name else name for name in PAIRS]
"""All pairs; only the first pair of each mixer is quick."""


def inputs(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, WIDTH, generator=torch.Generator().manual_seed(1))


def difference(output: Tensor, expected: Tensor) -> float:
    if output.numel() == 0:
        return 0.0
    return float((output - expected).detach().abs().max() / expected.detach().abs().max().clamp(min=1))


def in_steps(config: Any, mixer: nn.Module, x: Tensor, lengths: Sequence[int]) -> Tensor:
    tensors = states(config, x.size(0), x.dtype)
    return torch.cat([mixer(piece, context(tensors)) for piece in x.split(lengths, dim=1)], dim=1)


def shorten_chunks(mixer: nn.Module, size: int) -> None:
    for module in mixer.modules():
        if hasattr(module, "chunk"):
            module.chunk = size


@pytest.mark.parametrize("name", PAIR_NAMES)
@torch.no_grad()
def test_mixer_is_the_published_class(name: str) -> None:
    pair = PAIRS[name]
    theirs = pair.theirs()
    config, mixer = pair.ours(theirs)
    x = inputs()
    expected = pair.output(theirs, x)
    assert expected.std() > 0.05, "the comparison means something"
    assert difference(mixer(x, context()), expected) <= 1e-5

    mixer = mixer.double()
    x = x.double()
    full = mixer(x, context())
    assert difference(expected.double(), full) <= 1e-5
    assert full.dtype == torch.float64
    for lengths in ([1] * LENGTH, [7, 1, 5, LENGTH - 13], [LENGTH - 1, 1], [64, LENGTH - 64]):
        assert difference(in_steps(config, mixer, x, lengths), full) <= 1e-12, lengths
    shorten_chunks(mixer, 5)
    short = x[:, :23]
    assert difference(mixer(short, context()), full[:, :23]) <= 1e-12
    assert difference(in_steps(config, mixer, short, [7, 1, 1, 5, 9]), full[:, :23]) <= 1e-12


@pytest.mark.parametrize("name", PAIR_NAMES)
def test_chunks_are_declared(name: str) -> None:
    config, mixer = PAIRS[name].ours(PAIRS[name].theirs())
    paths = [f"{path}.chunk".lstrip(".") for path, module in mixer.named_modules() if hasattr(module, "chunk")]
    assert list(config.chunk_attributes) == paths


@pytest.mark.parametrize("name", PAIR_NAMES)
@torch.no_grad()
def test_padding_enters_no_state(name: str) -> None:
    config, mixer = PAIRS[name].ours(PAIRS[name].theirs())
    mixer, x = mixer.double(), inputs().double()
    counts = [0, 61]
    padding = torch.arange(70) < torch.tensor(counts)[:, None]
    tensors = states(config, 2, x.dtype)
    y = mixer(x[:, :70], context(tensors, padding))
    alone = states(config, 1, x.dtype)
    assert difference(y[1:, :61], mixer(x[1:, :61], context(alone))) <= 1e-12
    assert all(difference(state[1:], single) <= 1e-12 for state, single in zip(tensors, alone, strict=True))
    assert all(not state[0].any() for state in tensors), "a row without tokens keeps its empty states"

    before = [state.clone() for state in tensors]
    mixer(x[:, 70:77], context(tensors, torch.zeros(2, 7, dtype=torch.bool)))
    assert all(torch.equal(state, earlier) for state, earlier in zip(tensors, before, strict=True))

    rest = torch.tensor([[True, True, False], [True, False, False]])
    y = mixer(x[:, 80:83], context(tensors, rest))
    assert difference(y[1:, :1], mixer(x[1:, 80:81], context(alone))) <= 1e-12
    assert difference(y[:1, :2], mixer(x[:1, 80:82], context())) <= 1e-12


SMALL_MIXERS = {name: PAIRS[name].fields for name in PAIRS if "," not in name and " " not in name}
SMALL_MIXERS |= {
    "mamba2 with everything": PAIRS["mamba2 gated after its norm"].fields,
    "rg_lru": PAIRS["rg_lru"].fields,
}
QUICK_MIXERS = ("short_conv", "gated_delta", "rg_lru", "channel_mix")
SMALL_MIXER_NAMES = [
    name if name in QUICK_MIXERS else pytest.param(name, marks=pytest.mark.slow) for name in SMALL_MIXERS
]
"""All small mixers; only the smallest state, the largest code, a state of a third type, and an FFN are quick."""


def model_of(name: str) -> torch.fx.GraphModule:
    return hybrid(dict(SMALL_MIXERS[name]), None)


def hybrid(mixer: dict[str, Any], attention: dict[str, Any] | None) -> torch.fx.GraphModule:
    """Build a model with a mixer or FFN in each layer; with an attention, every second layer has it instead."""
    variants = {"variants": {"full": {"mixer": None, "attention": attention}}, "pattern": ["base", "full"]}
    spec = {
        "tfkit": 1,
        "name": "test",
        "d_model": WIDTH,
        "vocab_size": 50,
        "max_len": 256,
        "graph": {
            "embedding": {"block": "embedding"},
            "decoder": {
                "block": "decoder",
                "n_layers": 2,
                "attention": None,
                "ffn": {"kind": "swiglu", "d_ff": 32},
                slot_of(mixer): mixer,
                **({} if attention is None else {"layers": variants}),
            },
            "logits": {"block": "lm_head"},
        },
    }
    return tfkit.build(tfkit.load(spec, plugins=PLUGINS)).eval()


DOCUMENTS = (11, 1, 3, 5, 2)
"""Lengths of documents in a row: one is longer than two chunks, and some begin within a chunk or at its start."""


@pytest.mark.parametrize("name", SMALL_MIXERS)
def test_a_state_restarts_where_a_document_begins(name: str) -> None:
    _, mixer = built(SMALL_MIXERS[name])
    shorten_chunks(mixer.double(), 4)
    x = inputs(length=sum(DOCUMENTS)).double().requires_grad_()
    weights = torch.randn(x.shape, dtype=x.dtype)
    numbers = torch.arange(len(DOCUMENTS)).repeat_interleave(torch.tensor(DOCUMENTS)).expand(2, -1)
    parameters = [x, *(values for values in mixer.parameters() if values.requires_grad)]
    y = mixer(x, context(documents=numbers))
    alone = torch.cat([mixer(document, context()) for document in x.split(DOCUMENTS, dim=1)], dim=1)
    assert difference(y, alone) <= 1e-12
    assert difference(y, mixer(x, context())) > 1e-3, "documents matter"
    gradients, expected = (torch.autograd.grad((output * weights).sum(), parameters) for output in (y, alone))
    assert all(difference(*pair) <= 1e-12 for pair in zip(gradients, expected, strict=True))


@pytest.mark.slow
@torch.no_grad()
def test_documents_in_the_rows_of_a_compiled_hybrid() -> None:
    mixers = {"kind": "gated_delta", "n_heads": 4, "n_key_heads": 2, "d_key": 6, "d_value": 5}
    attention = {"kind": "gqa", "n_heads": 4, "n_kv_heads": 2, "position": "rope"}
    model = hybrid(mixers, attention)
    lengths = torch.tensor([70, 1, 3, 64])
    of = torch.arange(4).repeat_interleave(lengths)
    ids, mask = torch.randint(50, (1, len(of))), (of[:, None] == of)[None]
    alone = torch.cat([model(document) for document in ids.split(lengths.tolist(), dim=1)], dim=1)
    torch.testing.assert_close(model(ids, mask), alone, atol=1e-5, rtol=1e-5)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(ids, mask), alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", SMALL_MIXER_NAMES)
@torch.no_grad()
def test_wide_states_stay_wide(name: str) -> None:
    model = model_of(name).bfloat16()
    decoder = tfkit.CachedModel(model, length=8)
    tokens = torch.randint(50, (2, 5))
    decoder(tokens)
    config = model.meta["components"][f"decoder.layers.0.{slot_of(SMALL_MIXERS[name])}"]
    types = [torch.float32 if state.wide else torch.bfloat16 for state in config.cached]
    assert (torch.float32 in types) == (name not in ("short_conv", "channel_mix"))
    assert [tensor.dtype for tensor in decoder._cache["decoder"][0]] == types
    full = model(tokens)
    assert full.dtype == torch.bfloat16
    assert full.isfinite().all()


@pytest.mark.parametrize("name", SMALL_MIXERS)
def test_gradients_are_finite_and_reach_every_parameter(name: str) -> None:
    _, mixer = built(SMALL_MIXERS[name])
    x = inputs(length=40).requires_grad_()
    padding = torch.arange(40) < torch.tensor([[40], [21]])
    mixer(x, context(padding=padding))[padding].square().sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()
    assert not x.grad[1, 21:].any()
    for parameter, values in mixer.named_parameters():
        if values.requires_grad:
            assert values.grad is not None, parameter
            assert values.grad.isfinite().all(), parameter
            assert values.grad.any(), parameter


@pytest.mark.parametrize("name", SMALL_MIXER_NAMES)
def test_rates_do_not_decay(name: str) -> None:
    model = model_of(name)
    decaying, constant = tfkit.parameter_groups(model)
    names = {id(values): parameter for parameter, values in model.named_parameters()}
    rates = {"a_log", "step_bias", "skip", "decay", "bonus", "slopes", "input_bias", "forget_bias"}
    assert not rates & {names[id(values)].rpartition(".")[2] for values in decaying["params"]}
    assert {names[id(values)].rpartition(".")[2] for values in constant["params"]} & {*rates, "weight"}


@pytest.mark.parametrize("name", SMALL_MIXER_NAMES)
def test_bfloat16_model(name: str) -> None:
    """The recurrence is computed in float32, the norm after it in the type of its weights."""
    graph = model_of(name).meta["graph"]
    model = tfkit.build(graph, dtype=torch.bfloat16).eval()
    logits = model(torch.arange(8)[None])
    assert logits.dtype == torch.bfloat16
    wide = tfkit.build(graph).eval()
    wide.load_state_dict(model.state_dict())
    torch.testing.assert_close(logits.float(), wide(torch.arange(8)[None]), rtol=0.0, atol=0.1)


def test_an_output_norm_without_scale_has_no_weight() -> None:
    graph = tfkit.load("mamba2_130m", sets=["decoder.n_layers=1", "decoder.mixer.output_norm.scale=false"])
    names = [name for name, _ in tfkit.build(graph, device="meta").named_parameters()]
    assert not [name for name in names if "mixer.norm" in name]


@pytest.mark.parametrize("name", ["query_decay", "key_decay", "diagonal_decay"])
def test_tables_of_decays_are_those_of_the_published_class(name: str) -> None:
    pair = PAIRS["lightning"]
    theirs = pair.theirs()
    config, _ = pair.ours(theirs)
    table = theirs.get_buffer(name)
    torch.testing.assert_close(config.table(name, table, depth=1 / 2), table, rtol=1e-4, atol=1e-6)


@torch.no_grad()
def test_an_ffn_with_a_state_gets_the_tokens_first() -> None:
    """Padding in front of a row or between its tokens is no previous token."""
    model = model_of("channel_mix").double()
    tokens, mask = torch.arange(8)[None], torch.tensor([[False, False, True, True, False, True, False, True]])
    assert difference(model(tokens, mask)[mask], model(tokens[mask][None])[0]) <= 1e-12


@torch.no_grad()
def test_weights_of_any_size_and_decays_that_leave_nothing() -> None:
    """The first key may be so small that its exponential is 0, and a rate of decay so large that it is infinite."""
    _, mixer = built(SMALL_MIXERS["rwkv4"])
    x, expected = inputs(length=40), []
    mixer.decay.fill_(200.0)
    mixer.key.weight.mul_(1e4)
    mixer.bonus.fill_(1e9)
    for previous, token in zip(nn.functional.pad(x, [0, 0, 1, -1]).unbind(1), x.unbind(1), strict=True):
        value = mixer.value(torch.lerp(previous, token, mixer.value_mix))  # the bonus leaves nothing but the own value
        gate = torch.sigmoid(mixer.receptance(torch.lerp(previous, token, mixer.receptance_mix)))
        expected.append(mixer.output(gate * value))
    assert difference(mixer(x, context()), torch.stack(expected, dim=1)) <= 1e-6

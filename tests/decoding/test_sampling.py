"""Scores, compared with transformers' processors; draws follow the probabilities, independently for each row."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    GenerationConfig,
    GPT2Config,
    GPT2LMHeadModel,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.logits_process import LogitsProcessor

from tfkit.decoding.sampling import Sampler, Sampling, drawn_tokens, top_p

CPU = torch.device("cpu")
VOCAB = 11


def processors(sampling: Sampling) -> list[LogitsProcessor]:
    """Theirs, in the order in which `generate()` applies them."""
    results: list[LogitsProcessor] = []
    if sampling.repetition_penalty != 1:
        results.append(RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty)))
    results.append(TemperatureLogitsWarper(float(sampling.temperature)))
    if sampling.top_k is not None:
        results.append(TopKLogitsWarper(sampling.top_k))
    if sampling.top_p is not None:
        results.append(TopPLogitsWarper(sampling.top_p))
    return results


def seen_tokens(ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Which tokens stand in each row, by a loop."""
    actual = torch.zeros(ids.size(0), VOCAB, dtype=torch.bool)
    for row, column in torch.ones_like(ids).nonzero().tolist():
        actual[row, ids[row, column]] |= mask is None or bool(mask[row, column])
    return actual


SAMPLINGS = st.builds(
    Sampling,
    temperature=st.sampled_from([0.3, 1.0, 2.5]),
    top_k=st.sampled_from([None, 1, 3, 11, 50]),
    top_p=st.sampled_from([None, 1e-6, 0.3, 0.9, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 0.5, 1.8]),
)


@pytest.mark.parametrize("temperature", [1e-20, 1e-40, 5e-324])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_next_to_zero_it_takes_the_likeliest(temperature: float, dtype: torch.dtype) -> None:
    logits = torch.tensor([[1.0, 3.0, -2.0], [-5.0, -7.0, -6.0], [0.0, 0.0, 1e4]], dtype=dtype)
    sampler = Sampler(Sampling(temperature, top_p=0.9), range(3), 1, 1, seed=1, device=CPU)
    assert sampler(logits).tolist() == [1, 0, 2]


@settings(deadline=None, max_examples=150)
@given(SAMPLINGS, st.integers(0, 2**31), st.booleans())
def test_scores_equal_hugging_face(sampling: Sampling, seed: int, ties: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(4, VOCAB, generator=generator)
    logits = logits.round() if ties else logits
    ids = torch.randint(VOCAB, (4, 5), generator=generator)
    expected = logits.clone()
    for process in processors(sampling):
        expected = process(ids, expected)
    actual = sampling.scores(logits, seen_tokens(ids))
    torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    assert bool(actual.isfinite().any(dim=1).all())


@pytest.mark.parametrize("p", [0.25, 0.5, 0.75])
def test_top_p_at_the_very_edge(p: float) -> None:
    scores = torch.zeros(1, 4)
    assert torch.equal(top_p(scores, p), TopPLogitsWarper(p)(scores, scores))  # type: ignore[arg-type]


def test_the_order_is_that_of_generate() -> None:
    model = GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=1, n_head=1, vocab_size=VOCAB, n_positions=8))
    config = GenerationConfig(do_sample=True, temperature=0.5, top_k=3, top_p=0.5, repetition_penalty=1.5, num_beams=1)
    theirs = model._get_logits_processor(config, input_ids_seq_length=3, device="cpu")
    ours = processors(Sampling(0.5, 3, 0.5, 1.5))
    assert [type(processor) for processor in theirs if type(processor) in map(type, ours)] == [
        type(processor) for processor in ours
    ]


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([0.0, 0.5, 0.0, 0.25, 0.125, 0.125, 0.0])
    draws = (torch.arange(4096, dtype=torch.float64) + 0.5) / 4096
    tokens = drawn_tokens(probabilities.log().expand(4096, -1), draws)
    assert torch.equal(tokens.bincount(minlength=7) / 4096, probabilities)


def test_the_ends_of_the_draws_are_possible_tokens() -> None:
    scores = torch.tensor([[-torch.inf, 0.3, 0.1, -torch.inf]]).expand(2, -1)
    assert drawn_tokens(scores, torch.tensor([0.0, 1 - 2**-32], dtype=torch.float64)).tolist() == [1, 2]


def test_small_probabilities_are_not_lost() -> None:
    scores = torch.zeros(1, 128_001)
    scores[0, 0] = math.log(999 * 128_000)  # the others share a thousandth: less for each than float32 sums can show
    first, other = scores.double().softmax(dim=-1)[0, :2]
    for token in (1, 40_000, 100_000, 128_000):
        assert int(drawn_tokens(scores, (first + (token - 0.5) * other)[None])) == token


def test_half_precision_is_widened_before_anything_is_done_to_it() -> None:
    logits = torch.randn(2, VOCAB).bfloat16()
    sampling = Sampling(0.7, 4, 0.8)
    assert torch.equal(sampling.scores(logits), sampling.scores(logits.float()))


def choose(steps: int, logits: Tensor, **options: object) -> Tensor:
    """Tokens [rows, steps] with the same logits in every step."""
    arguments = {"prompts": 2, "n_samples": 2, "seed": 7, "sampling": Sampling(1.0), **options}
    prompts = range(arguments["prompts"])  # type: ignore[call-overload]
    sampler = Sampler(steps=steps, device=CPU, **(arguments | {"prompts": prompts}))  # type: ignore[arg-type]
    rows = arguments["prompts"] * arguments["n_samples"]  # type: ignore[operator]
    return torch.stack([sampler(logits.expand(rows, -1)) for _ in range(steps)], dim=1)


@pytest.mark.parametrize(
    ("options", "rows", "steps"),
    [
        ({"prompts": 5}, [0, 1, 2, 3], 40),
        ({"n_samples": 3}, [0, 1, 3, 4], 40),
        ({}, [0, 1, 2, 3], 90),
    ],
    ids=["more prompts", "more samples", "more steps"],
)
def test_a_row_does_not_depend_on_what_else_is_drawn(
    options: Mapping[str, object], rows: list[int], steps: int
) -> None:
    logits = torch.zeros(1, VOCAB)
    before = choose(40, logits)
    assert torch.equal(choose(steps, logits, **options)[rows, :40], before)
    assert len({tuple(row) for row in before.tolist()}) == 4, "all rows have draws of their own"
    assert not torch.equal(choose(40, logits, seed=8), before)


def test_greedy_takes_the_likeliest() -> None:
    logits = torch.randn(3, VOCAB)
    sampler = Sampler(Sampling(), range(3), 1, 2, seed=0, device=CPU)
    assert torch.equal(sampler(logits), logits.argmax(dim=1))
    assert torch.equal(sampler(-logits), logits.argmin(dim=1))


def test_the_penalty_is_for_the_prompt_without_padding_and_for_what_was_chosen() -> None:
    ids, mask = torch.tensor([[0, 0, 3], [2, 5, 3]]), torch.tensor([[False, False, True], [True, True, True]])
    sampler = Sampler(Sampling(repetition_penalty=4.0), range(2), 1, 5, seed=0, device=CPU)
    sampler.read(ids, mask, VOCAB)
    logits = torch.linspace(2.0, 1.0, VOCAB).expand(2, -1)
    result = []
    for _ in range(4):
        expected = RepetitionPenaltyLogitsProcessor(4.0)(ids[:, -1:], logits.clone())[:1].argmax()
        result.append(sampler(logits))
        ids = torch.cat([ids, result[-1][:, None]], dim=1)
        assert len(result) > 1 or expected == 0
    assert torch.stack(result, dim=1).tolist() == [[0, 1, 2, 4], [0, 1, 4, 6]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "`temperature` of `Sampling` must be a number of 0 or more; got -0.1"),
        ({"temperature": float("nan")}, "`temperature` of `Sampling` must be a number of 0 or more; got nan"),
        ({"temperature": 1.0, "top_k": 0}, "`top_k` of `Sampling` must be an integer of 1 or more or None; got 0"),
        (
            {"temperature": 1.0, "top_p": 0.0},
            "`top_p` of `Sampling` must be a number of more than 0 and at most 1 or None; got 0.0",
        ),
        (
            {"temperature": 1.0, "top_p": 1.1},
            "`top_p` of `Sampling` must be a number of more than 0 and at most 1 or None; got 1.1",
        ),
        ({"repetition_penalty": 0.0}, "`repetition_penalty` of `Sampling` must be a number of more than 0; got 0.0"),
        ({"top_k": 3}, "top_k has no effect at temperature 0, which takes the likeliest token"),
        ({"top_p": 0.3}, "top_p has no effect at temperature 0, which takes the likeliest token"),
    ],
)
def test_what_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        Sampling(**options)  # type: ignore[arg-type]

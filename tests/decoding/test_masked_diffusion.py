"""Generation by masked diffusion: the tokens of an independent loop over a single sequence, without padding."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import fx

import tfkit
from tfkit.building.initialize import generator_of

from .small import build, spec_of

MASK = 7
PROMPTS = [[5, 9, 2, 2], [11], [3, 3, 8, 6, 1, 4]]
ENCODER = {"block": "encoder", "attention": {"n_heads": 4, "position": "rope"}}


@pytest.fixture(scope="module")
def model() -> fx.GraphModule:
    return build(spec_of(ENCODER))


def loop(
    model: fx.GraphModule,
    prompt: list[int],
    n: int,
    steps: int,
    size: int,
    *,
    random: bool,
    temperature: float,
    row: str,
) -> tuple[list[int], int]:
    """The answer of n tokens in blocks of `size`, and the number of forwards."""
    generator, tokens, forwards = generator_of(5, row, "cpu"), [*prompt, *[MASK] * n], 0
    n_blocks = math.ceil(n / size)
    for block in range(n_blocks):
        first = len(prompt) + block * size
        positions = list(range(first, min(first + size, len(tokens))))
        n_steps = min(steps // n_blocks + (1 if block < steps % n_blocks else 0), len(positions))
        masked = set(positions)
        for step in range(n_steps):
            forwards += 1
            logits = model(torch.tensor([tokens]))[0].double().detach()
            logits[:, MASK] = -math.inf
            draws = torch.randint(2**32, (len(positions),), generator=generator) / 2**32 if temperature else []
            ids = {position: int(logits[position].argmax()) for position in positions}
            for position, draw in zip(positions, draws, strict=bool(temperature)):
                sums = (logits[position] / temperature).softmax(-1).cumsum(-1)
                ids[position] = next(token for token, total in enumerate(sums) if total > draw)
            confidence = {position: float(logits[position].softmax(-1)[ids[position]]) for position in positions}
            if random:
                order = torch.randint(2**32, (len(positions),), generator=generator).tolist()
                confidence = dict(zip(positions, order, strict=True))
            count = len(positions) // n_steps + (1 if step < len(positions) % n_steps else 0)
            for position in sorted(masked, key=lambda position: -confidence[position])[:count]:
                tokens[position] = ids[position]
                masked.remove(position)
    return tokens[len(prompt) :], forwards


@pytest.mark.parametrize(
    ("block", "steps"),
    [(None, 5), pytest.param(4, 7, id="equal", marks=pytest.mark.slow), (5, 8)],
    ids=["one", None, "unequal"],
)
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("temperature", [0.0, 0.8], ids=["greedy", "sampled"])
def test_tokens_equal_an_independent_loop(
    model: fx.GraphModule, block: int | None, steps: int, remasking: Any, temperature: float
) -> None:
    way = tfkit.MaskedDiffusion(MASK, steps=steps, block_length=block, remasking=remasking)
    samples = 2 if temperature or remasking == "random" else 1
    options: dict[str, Any] = {"temperature": temperature, "seed": 5, "n_samples": samples, "generation": way}
    result = tfkit.generate(model, PROMPTS, max_new_tokens=12, first_prompt=3, **options)
    kind: dict[str, Any] = {"random": remasking == "random", "temperature": temperature}
    expected = [
        loop(model, prompt, 12, steps, block or 12, row=f"{3 + number}/{sample}", **kind)
        for number, prompt in enumerate(PROMPTS)
        for sample in range(samples)
    ]
    assert result.rows() == [tokens for tokens, _ in expected]
    assert {result.forwards} == {forwards for _, forwards in expected}
    assert result.ended == ("length",) * len(expected)
    assert MASK not in result.tokens


def test_by_default_each_forward_reveals_a_token(model: fx.GraphModule) -> None:
    way = tfkit.MaskedDiffusion(MASK, block_length=4)
    result = tfkit.generate(model, PROMPTS[:1], max_new_tokens=10, generation=way)
    expected, forwards = loop(model, PROMPTS[0], 10, 12, 4, random=False, temperature=0.0, row="")
    assert result.rows() == [expected]
    assert result.forwards == forwards == 10


@pytest.mark.parametrize(
    ("steps", "block", "length", "expected"),
    [
        (None, None, 3, [[1, 1, 1]]),
        (3, None, 11, [[4, 4, 3]]),
        (20, None, 3, [[1, 1, 1]]),
        (3, 4, 11, [[4], [4], [3]]),  # as many steps as blocks
        (5, 4, 12, [[2, 2], [2, 2], [4]]),
        (7, 4, 10, [[2, 1, 1], [2, 2], [1, 1]]),
        (12, 5, 11, [[2, 1, 1, 1], [2, 1, 1, 1], [1]]),
    ],
)
def test_steps_and_blocks_share_the_tokens(
    steps: int | None, block: int | None, length: int, expected: list[list[int]]
) -> None:
    """As `get_num_transfer_tokens` of LLaDA: a remainder goes to the first steps."""
    assert tfkit.MaskedDiffusion(MASK, steps=steps, block_length=block).counts(length) == expected


def test_a_row_ends_at_its_stop_and_the_answer_when_all_rows_have_ended(model: fx.GraphModule) -> None:
    way = tfkit.MaskedDiffusion(MASK, steps=6, block_length=4)
    options: dict[str, Any] = {"max_new_tokens": 12, "generation": way, "temperature": 1.5, "seed": 1}
    full = tfkit.generate(model, PROMPTS, **options)
    stops = [full.rows()[0][3], full.rows()[1][1]]
    calls: list[Any] = []
    result = tfkit.generate(model, PROMPTS, stop=stops, on_token=lambda tokens: calls.append(list(tokens)), **options)
    lengths = [next(i for i, token in enumerate(row, start=1) if token in stops) for row in full.rows()]
    assert result.rows() == [row[:length] for row, length in zip(full.rows(), lengths, strict=True)]
    assert result.ended == ("stop",) * 3
    assert lengths == [4, 2, 5]  # the last one is in the second block
    assert result.forwards == 4 < full.forwards == 6
    assert len(calls) == max(lengths)
    for row, length in enumerate(lengths):
        assert [step[row] for step in calls] == [*result.rows()[row], *[None] * (max(lengths) - length)]


def test_top_k_restricts_the_tokens_but_not_the_confidence(model: fx.GraphModule) -> None:
    way = tfkit.MaskedDiffusion(MASK, steps=4)
    options: dict[str, Any] = {"max_new_tokens": 9, "generation": way, "seed": 3}
    greedy = tfkit.generate(model, PROMPTS, **options)
    assert tfkit.generate(model, PROMPTS, temperature=5.0, top_k=1, **options).rows() == greedy.rows()
    assert tfkit.generate(model, PROMPTS, temperature=5.0, **options).rows() != greedy.rows()


def test_learned_positions_and_further_inputs(model: fx.GraphModule) -> None:
    """Each row has its own values of further inputs, and positions that padding does not change."""
    stack = {**ENCODER, "attention": {"n_heads": 4}, "memory": "source"}
    conditioned = build(spec_of(stack, {"position": "learned"}, source={"type": "features", "width": 12}))
    source = torch.randn(3, 4, 12, generator=torch.Generator().manual_seed(1))
    way = tfkit.MaskedDiffusion(MASK, steps=3)
    options: dict[str, Any] = {"max_new_tokens": 6, "generation": way, "temperature": 0.9, "n_samples": 2, "seed": 4}
    together = tfkit.generate(conditioned, PROMPTS, source=source, **options).rows()
    alone = [
        row
        for number, prompt in enumerate(PROMPTS)
        for row in tfkit.generate(
            conditioned, [prompt], source=source[number, None], first_prompt=number, **options
        ).rows()
    ]
    assert together == alone


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation": tfkit.MaskedDiffusion(23)}, "the mask token must be an id of the vocabulary of `m`, 0 to 22"),
        ({"generation": tfkit.MaskedDiffusion(MASK, steps=2, block_length=4)}, "`steps` must be at least the number"),
        ({"tokens": [[3, MASK]]}, "a prompt must not contain the mask token; got 7"),
        ({"compile": True}, "`compile` cannot be combined with masked diffusion"),
        ({"drafts": ["later"]}, "`drafts` cannot be combined with masked diffusion"),
        ({"length": 20}, "`length` cannot be combined with masked diffusion"),
        ({"repetition_penalty": 1.2}, "`repetition_penalty` cannot be combined with masked diffusion"),
        ({"n_samples": 2}, "`n_samples` above 1 needs a temperature above 0"),
    ],
)
def test_what_cannot_be_generated_is_an_error(model: fx.GraphModule, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfkit.generate(
            model, **{"tokens": [[3, 4]], "max_new_tokens": 9, "generation": tfkit.MaskedDiffusion(MASK)} | options
        )


def test_the_length_of_the_model_limits_prompt_and_answer() -> None:
    model = build(spec_of({**ENCODER, "attention": {"n_heads": 4}}, {"position": "learned"}))
    with pytest.raises(ValueError, match="max_new_tokens must be at most 36"):
        tfkit.generate(model, PROMPTS[:1], max_new_tokens=37, generation=tfkit.MaskedDiffusion(MASK))


@pytest.mark.parametrize("tokens", ["tokens", {"type": "tokens", "length": 12}], ids=["any", "fixed"])
def test_a_causal_model_is_rejected_by_name(tokens: Any) -> None:
    model = build(spec_of({"attention": {"n_heads": 4, "position": "rope"}}, tokens=tokens))
    with pytest.raises(ValueError, match=r"attends to later tokens.*`m` predicts each token from the tokens before it"):
        tfkit.generate(model, PROMPTS[:1], max_new_tokens=8, generation=tfkit.MaskedDiffusion(MASK))


def test_a_model_of_a_fixed_length_takes_prompts_that_fill_it() -> None:
    model = build(spec_of(ENCODER, tokens={"type": "tokens", "length": 12}))
    way = tfkit.MaskedDiffusion(MASK, steps=3)
    result = tfkit.generate(model, PROMPTS[:1], max_new_tokens=8, generation=way)
    expected, _ = loop(model, PROMPTS[0], 8, 3, 8, random=False, temperature=0.0, row="")
    assert result.rows() == [expected]
    with pytest.raises(ValueError, match="prompts must have equal lengths: `tokens` of `m` has no padding mask"):
        tfkit.generate(model, PROMPTS, max_new_tokens=6, generation=way)
    with pytest.raises(ValueError, match="`tokens` must have 12 positions"):
        tfkit.generate(model, PROMPTS[:1], max_new_tokens=9, generation=way)


def test_an_encoder_without_a_way_to_generate_is_an_error_with_help(model: fx.GraphModule) -> None:
    with pytest.raises(tfkit.SpecError, match=r"generation=tfkit\.MaskedDiffusion"):
        tfkit.generate(model, PROMPTS, max_new_tokens=4)


def test_not_finite_logits_are_an_error() -> None:
    model = build(spec_of(ENCODER))
    with torch.no_grad():
        model.get_parameter("logits.output.weight")[3, 3] = math.nan
    with pytest.raises(ValueError, match="the logits are NaN"):
        tfkit.generate(model, PROMPTS, max_new_tokens=4, generation=tfkit.MaskedDiffusion(MASK))

"""Generation, compared with transformers and with a full forward for every token."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tfkit
from tfkit.decoding.cached import CachedModel
from tfkit.decoding.generate import Generated, generate, left_padded

from ..families.case import Trial
from ..families.cases import CASES
from ..sampling import slow, some
from .recomputed import Recomputed

pytestmark = pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")  # sure of its tokens on purpose

PROMPTS = [[5, 9, 2], [7], [3, 3, 8, 60, 1, 4]]
SPEC = """\
tfkit: 1
name: small
d_model: 16
vocab_size: 20
max_len: 12
dropout: 0.5
graph:
  embedding: {block: embedding, position: learned}
  decoder: {block: decoder, n_layers: 1, attention: {n_heads: 2}, ffn: {kind: gelu, d_ff: 32}}
  logits: {block: lm_head}
init: {kind: normal, std: 1.0}
"""


@pytest.fixture
def model() -> torch.fx.GraphModule:
    """A model in train mode, with a dropout that would be seen."""
    return tfkit.build(tfkit.loads(SPEC))


@pytest.fixture(scope="module")
def trial(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """Hugging Face's model of a family, and ours with its weights."""
    return Trial.of(CASES[request.param], tmp_path_factory.mktemp(request.param))


def theirs_continues(theirs: nn.Module, new: int, *, start: int | None = None, **options: Any) -> list[list[int]]:
    """Hugging Face's own generation, greedy, each prompt by itself; `start` is the decoder's token, if it has one."""
    config = {"do_sample": False, "num_beams": 1, "max_new_tokens": new, "pad_token_id": 0, "eos_token_id": None}
    if start is not None:  # their cache of T5 has as many layers as the encoder
        config |= {"decoder_start_token_id": start, "forced_eos_token_id": None, "use_cache": False}
    rows = [theirs.generate(torch.tensor([prompt]), **config | options)[0].tolist() for prompt in PROMPTS]  # type: ignore[operator]
    return [row[1 if start is not None else len(prompt) :] for row, prompt in zip(rows, PROMPTS, strict=True)]


@pytest.mark.parametrize("cached", some([False, True], 1), ids=["recomputed", "cached"])
@pytest.mark.parametrize("penalty", [slow(1.0), 1.5])
@pytest.mark.parametrize("trial", ["gpt2", "llama", "mistral"], indirect=True)
def test_greedy_equals_hugging_face(trial: Trial, penalty: float, cached: bool) -> None:
    expected = theirs_continues(trial.theirs, 10, repetition_penalty=penalty)
    model = trial.ours if cached else Recomputed(trial.ours)
    actual = generate(model, PROMPTS, max_new_tokens=10, repetition_penalty=penalty)  # type: ignore[arg-type]
    assert actual.rows() == expected
    assert len({tuple(row) for row in expected}) == 3
    assert actual.ended == ("length",) * 3


@pytest.mark.parametrize("cached", some([False, True], 1), ids=["recomputed", "cached"])
@pytest.mark.parametrize(("trial", "start"), [("t5", 0), ("bart", 2)], indirect=["trial"])
def test_encoder_decoder_equals_hugging_face(trial: Trial, start: int, cached: bool) -> None:
    expected = theirs_continues(trial.theirs, 8, start=start, repetition_penalty=1.5)
    model = trial.ours if cached else Recomputed(trial.ours)
    actual = generate(model, [[start]] * 3, max_new_tokens=8, repetition_penalty=1.5, source=PROMPTS)  # type: ignore[arg-type]
    assert actual.rows() == expected
    assert len({tuple(row) for row in expected}) == 3


@pytest.mark.parametrize("trial", ["gpt2"], indirect=True)
def test_a_stop_token_equals_hugging_face(trial: Trial) -> None:
    free = theirs_continues(trial.theirs, 10)
    end = free[0][4]
    actual = generate(trial.ours, PROMPTS, max_new_tokens=10, stop=[end], pad=1)
    assert actual.rows() == theirs_continues(trial.theirs, 10, eos_token_id=end)
    assert actual.rows()[0][-1] == end
    assert actual.ended[0] == "stop"
    assert all(set(row[length:]) <= {1} for row, length in zip(actual.tokens.tolist(), actual.lengths, strict=True))


def test_cached_samples_are_the_recomputed_ones(model: torch.fx.GraphModule) -> None:
    options = {"max_new_tokens": 6, "temperature": 1.0, "top_k": 15, "top_p": 0.99, "n_samples": 3, "seed": 3}
    prompts = [[1, 2, 3], [4]]
    actual = generate(model, prompts, **options)  # type: ignore[arg-type]
    expected = generate(Recomputed(tfkit.build(tfkit.loads(SPEC)).eval()), prompts, **options)  # type: ignore[arg-type]
    assert torch.equal(actual.tokens, expected.tokens)
    assert len({tuple(row) for row in actual.rows()}) == 6


def test_parts_of_a_list_of_prompts_draw_what_the_entire_list_draws(model: torch.fx.GraphModule) -> None:
    options = {"max_new_tokens": 4, "temperature": 1.0, "n_samples": 2, "seed": 3}
    prompts = [[1, 2], [3, 4], [3, 4]]
    rows = generate(model, prompts, **options).rows()  # type: ignore[arg-type]
    parts = [generate(model, prompts[i:][:2], first_prompt=i, **options).rows() for i in (0, 2)]  # type: ignore[arg-type]
    assert parts == [rows[:4], rows[4:]]
    assert rows[2:4] != rows[4:]


def test_a_cache_may_be_used_again(model: torch.fx.GraphModule) -> None:
    cached = CachedModel(model.eval(), length=12)
    for prompts in ([[1, 2, 3], [4]], [[5, 6], [7, 8]], [[9] * 7]):
        assert generate(cached, prompts, max_new_tokens=4).rows() == generate(model, prompts, max_new_tokens=4).rows()
    with pytest.raises(ValueError, match=r"^length and compile have no effect on a CachedModel"):
        generate(cached, [[1]], max_new_tokens=1, length=4)
    with pytest.raises(ValueError, match=r"max_new_tokens must be at most 5$"):
        generate(cached, [[1] * 7], max_new_tokens=6)


def test_the_model_stays_in_its_mode(model: torch.fx.GraphModule) -> None:
    model.embedding.eval()  # type: ignore[union-attr]
    before = {name: module.training for name, module in model.named_modules()}
    assert len(set(before.values())) == 2
    generate(model, [[1]], max_new_tokens=1)
    assert {name: module.training for name, module in model.named_modules()} == before


# ---- prompts ----


@pytest.mark.parametrize("side", ["lists", "left", "right", "anywhere"])
def test_padding_may_stand_anywhere(model: torch.fx.GraphModule, side: str) -> None:
    rows = [[1, 2, 3, 4], [5, 6], [7, 8, 9]]
    expected = [generate(model, [row], max_new_tokens=5).rows()[0] for row in rows]
    padding = {
        "left": [[2, 3, 4, 5], [4, 5], [3, 4, 5]],
        "right": [[0, 1, 2, 3], [0, 1], [0, 1, 2]],
        "anywhere": [[0, 1, 2, 4], [0, 5], [1, 3, 4]],
    }
    if side == "lists":
        assert generate(model, rows, max_new_tokens=5).rows() == expected
        return
    tokens, mask = torch.full((3, 6), 11), torch.zeros(3, 6, dtype=torch.bool)
    for row, (ids, columns) in enumerate(zip(rows, padding[side], strict=True)):
        tokens[row, columns], mask[row, columns] = torch.tensor(ids), True
    assert generate(model, tokens, mask=mask, max_new_tokens=5).rows() == expected


def test_left_padded() -> None:
    tokens, mask = left_padded(torch.tensor([[9, 1, 2, 9], [9, 9, 3, 9]]), torch.tensor([[0, 1, 1, 0], [0, 0, 1, 0]]))
    assert tokens.tolist() == [[1, 2], [0, 3]]
    assert mask is not None
    assert mask.tolist() == [[True, True], [False, True]]
    assert left_padded([[1], [2]])[1] is None


# ---- ends ----


def script(*rows: Sequence[int]) -> Any:
    """In the place of a cache: a model that says these rows, whatever it reads."""
    model = tfkit.build(tfkit.loads(SPEC)).eval()

    class Script(Recomputed):
        def __call__(self, tokens: Tensor, mask: Tensor | None = None, *, keep: int = 0) -> Tensor:
            step = self.used
            self.used += 1
            return nn.functional.one_hot(torch.tensor([row[step] for row in rows]), 20).float()[:, None]

    return Script(model, length=100)


def continued(rows: Sequence[Sequence[int]], limit: int = 9, **options: Any) -> Generated:
    return generate(script(*rows), [[1]] * len(rows), max_new_tokens=limit, **options)


def test_rows_end_one_by_one() -> None:
    rows = [[5, 6, 7, 8, 9, 4, 4, 4, 4], [5, 8, 6, 7, 6, 4, 4, 4, 4], [4, 4, 4, 4, 4, 4, 4, 9, 4]]
    actual = continued(rows, stop=[9, (6, 7)], pad=3)
    assert actual.rows() == [[5, 6, 7], [5, 8, 6, 7], [4, 4, 4, 4, 4, 4, 4, 9]]
    assert actual.tokens.tolist()[0] == [5, 6, 7, 3, 3, 3, 3, 3]
    assert actual.lengths == (3, 4, 8)
    assert continued(rows, stop=[9, (6, 7)], limit=4).ended == ("stop", "stop", "length")
    assert continued(rows, stop=[9, (6, 7)], limit=4).tokens.shape == (3, 4)


def test_a_stop_sequence_is_not_found_in_the_prompt_and_the_answer_together() -> None:
    assert continued([[2, 3, 1, 2, 5]], limit=5, stop=[(1, 2)]).rows() == [[2, 3, 1, 2]]


def test_on_token_sees_every_step_and_may_end_rows() -> None:
    steps = []

    def take(tokens: Sequence[int | None]) -> list[int] | None:
        steps.append(list(tokens))
        return [1] if len(steps) == 2 else None

    actual = continued([[5, 6, 9, 4], [7, 8, 9, 4]], limit=4, stop=[9], on_token=take)
    assert steps == [[5, 7], [6, 8], [9, None]]
    assert actual.rows() == [[5, 6, 9], [7, 8]]
    assert actual.ended == ("stop", "stop")


def test_each_token_is_read_once_and_the_last_not_at_all() -> None:
    model = script([5, 6, 7, 8])
    generate(model, [[1]], max_new_tokens=3)
    assert model.used == 3


# ---- refusals ----

NAN = float("nan")


@pytest.mark.parametrize(
    ("tokens", "options", "message"),
    [
        ([[1] * 13], {}, "a prompt must be shorter than the maximum length of the model, 12; got 13"),
        ([[1] * 12], {}, "a prompt must be shorter than the maximum length of the model, 12; got 12"),
        (
            [[1] * 10],
            {"max_new_tokens": 3},
            "a prompt of 10 tokens with 3 new tokens exceeds the maximum length of the model, 12: "
            "max_new_tokens must be at most 2",
        ),
        ([[1] * 10], {"length": 10}, "a prompt must be shorter than the maximum length of the model, 10; got 10"),
        ([[1], []], {}, "prompt 2 of 2 must have at least one token"),
        ([], {}, "there must be a prompt, for instance [[1, 2, 3]]"),
        ([[]], {}, "prompt 1 of 1 must have at least one token"),
        (
            [1, 2],
            {},
            "`tokens` of `generate` must be a tensor [b, t] or a list of lists of token ids "
            "(one prompt is [[1, 2, 3]]); got a list of 1, ...",
        ),
        (torch.zeros(2), {}, "tokens must be integers [b, t]; got torch.float32 [2]"),
        (torch.ones(1, 2), {}, "tokens must be integers [b, t]; got torch.float32 [1, 2]"),
        ([[1]], {"mask": torch.ones(1, 1)}, "mask has no effect with lists, which have no padding"),
        (
            torch.ones(1, 2).long(),
            {"mask": torch.ones(1, 1, dtype=torch.bool)},
            "mask must have the shape of tokens, [1, 2]; got [1, 1]",
        ),
        ([[1, 20]], {}, "20 is not a token id of this model: `tokens` may be 0 to 19"),
        ([[1, -1]], {}, "-1 is not a token id of this model: `tokens` may be 0 to 19"),
        ([[1], [1, 2]], {"pad": 99}, "99 is not a token id of this model: `tokens` may be 0 to 19"),
        ([[1]], {"max_new_tokens": 0}, "`max_new_tokens` of `generate` must be an integer of 1 or more; got 0"),
        ([[1]], {"n_samples": 0}, "`n_samples` of `generate` must be an integer of 1 or more; got 0"),
        ([[1]], {"n_samples": 2}, "`n_samples` above 1 needs a temperature above 0: otherwise all samples are equal"),
        ([[1]], {"stop": [()]}, "a stop sequence must have a token"),
        ([[1]], {"top_p": 2.0}, "`top_p` of `generate` must be a number of more than 0 and at most 1 or None; got 2.0"),
    ],
)
def test_what_is_refused(model: torch.fx.GraphModule, tokens: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f"^{re.escape(message)}$"):
        generate(model, tokens, **{"max_new_tokens": 1, **options})


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("when", ["at once", "later"])
def test_logits_that_are_no_numbers(
    model: torch.fx.GraphModule, break_at: Callable[[nn.Module, int], None], temperature: float, when: str
) -> None:
    messages: list[object] = []
    break_at(model.logits, 0 if when == "at once" else 2)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^the logits are NaN in torch\.float32: the weights are corrupt"):
        generate(model, [[1]], max_new_tokens=5, temperature=temperature, on_token=messages.append)
    assert bool(messages) == (when == "later")


@pytest.fixture
def break_at() -> Callable[[nn.Module, int], None]:
    """`break_at(module, n)` makes all outputs of a module NaN from its call number n on."""

    def install(module: nn.Module, first: int) -> None:
        calls = []

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls.append(module)
            return output * NAN if len(calls) > first else output

        module.register_forward_hook(hook)

    return install


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "top_p": 0.9, "n_samples": 2}], ids=["greedy", "drawn"])
def test_the_device_of_new_tensors_changes_nothing(model: torch.fx.GraphModule, sampling: dict[str, Any]) -> None:
    want = generate(model, [[5, 9, 2], [7]], max_new_tokens=4, **sampling)
    with torch.device("meta"):
        actual = generate(model, [[5, 9, 2], [7]], max_new_tokens=4, **sampling)
    assert torch.equal(actual.tokens, want.tokens)

"""`tfkit check RUN`: a correct run has every property, and each planted bug breaks the property that is named."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

import tfkit
import tfkit.testing
from tfkit.errors import SpecError
from tfkit.run.checked_run import Run, load_run, positions_of
from tfkit.run.contract import IGNORE_INDEX, Batch, Ids, Order, Ratio
from tfkit.run.guarded_data import _GuardedExamples
from tfkit.run.kinds import tasks
from tfkit.run.kinds.callbacks import Ema, Spikes
from tfkit.run.kinds.metrics import CrossEntropyConfig, ExactMatch
from tfkit.run.kinds.optimizers import AdamWConfig, MuonConfig
from tfkit.run.kinds.parametrizations import MuPConfig
from tfkit.run.kinds.schedules import WSDConfig
from tfkit.run.run_spec import RunSpec
from tfkit.run.step_values import StepValues
from tfkit.run.training import evaluate, loop, order
from tfkit.run.training.evaluate import batch_tensors, evaluate_splits
from tfkit.run.training.optimizer import groups_of
from tfkit.tools.check.check import outcomes_of
from tfkit.tools.check.measure import Outcome
from tfkit.tools.check.properties.all import properties_of
from tfkit.tools.cost.of_run import flops_of_step
from tfkit.tools.train.check import data, optimizer, record
from tfkit.tools.train.check.run_under_test import EXAMPLES, SEQUENCES, RunUnderTest, TrainedSteps, reduced_run
from tfkit.tools.train.check.small_run import RunSubject, small_run

from ...known import RUNS
from ...run.training.runs import WITH_PLUGINS
from ...sampling import chosen, some

PLUGINS = tfkit.load_plugins(entry_points=False)
PROPERTIES = properties_of(PLUGINS).properties
RUN: Mapping[str, Any] = {
    "tfkit": 1,
    "name": "small",
    "model": {
        "vocab_size": "data.vocab_size",
        "d_model": 16,
        "dropout": 0.1,
        "graph": {
            "embedding": {"block": "embedding", "position": {"kind": "learned", "max_len": 8}},
            "decoder": {
                "block": "decoder",
                "n_layers": 1,
                "attention": {"kind": "mha", "n_heads": 2},
                "ffn": {"kind": "relu", "d_ff": 32},
            },
            "head": "lm_head",
        },
    },
    "data": {"kind": "addition", "digits": 2},
    "batch": {"sequences": 4},
    "steps": 50,
    "loss": {"kind": "cross_entropy", "label_smoothing": 0.1},
    "optimizer": {"kind": "adamw", "lr": 1e-2, "weight_decay": 0.1, "groups": [{"match": "*ffn*", "lr": 2e-2}]},
    "schedule": {"kind": "wsd", "warmup": 5, "decay": 10},
    "eval": {"every": 2, "splits": {"val": "all"}, "metrics": ["loss", "exact_match"]},
}
MUON = "optimizer={kind: muon, lr: 0.02, nesterov: false, scale: match_rms_adamw, others: {kind: adamw, lr: 3e-3}}"
OF_STEPS = "steps targets sums loss noise clipping schedule rates groups decay optimizer examples epochs".split()  # noqa: SIM905


def subject(*sets: str) -> RunUnderTest:
    """The run, with other values."""
    return reduced_run(load_run(RUN, PLUGINS, sets=sets), PLUGINS)


def measured(checked: RunUnderTest, *names: str) -> dict[str, Outcome]:
    properties = [prop for prop in PROPERTIES if prop.of == "run" and (not names or prop.name in names)]
    return {outcome.name: outcome for outcome in outcomes_of(checked, properties)}


def broken(checked: RunUnderTest, *names: str) -> dict[str, str]:
    return {name: result.fault for name, result in measured(checked, *names).items() if result.status != "ok"}


def test_steps_of_a_correct_run() -> None:
    assert broken(subject(), *OF_STEPS) == {}


def test_targets_of_several_outputs_and_documents() -> None:
    assert broken(subject(*SHIFTED), "targets", "loss") == {}


def test_evaluated_rows_may_be_longer_than_training_rows() -> None:
    run = small_run("data", {"kind": "calculator", "problems": 1000, "test": 50}, length=12)
    run["eval"] = {"every": 10, "splits": {"test": 1}, "metrics": [{"kind": "loss"}]}
    checked = reduced_run(load_run(run, PLUGINS), PLUGINS)
    assert positions_of(checked.run.data, "test") > checked.run.data.length
    assert broken(checked, "examples") == {}
    assert broken(replace(checked, run=checked.changed({}, change=_longer)), "examples") != {}


def _longer(batch: Batch, indices: Ids) -> Batch:
    """Pad batches that have more than their first example."""
    if len(indices) == 1:
        return batch
    inputs = {name: np.pad(ids, ((0, 0), (0, 1))) for name, ids in batch.inputs.items()}
    return replace(batch, inputs=inputs, targets=np.pad(batch.targets, ((0, 0), (0, 1)), constant_values=IGNORE_INDEX))


@pytest.mark.slow
def test_records_of_a_correct_run() -> None:
    """Except the properties of what the run does not have."""
    assert broken(subject()).keys() == {"numbers", "parametrization"}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_shipped_runs(name: str) -> None:
    checked = reduced_run(load_run(name, WITH_PLUGINS, count=flops_of_step), WITH_PLUGINS)
    assert {name: result.fault for name, result in measured(checked).items() if result.status == "failed"} == {}


# ---- planted bugs ----


def test_a_rate_that_must_be_0_is_compared_with_its_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """The group has the rate 0 at the last step of this schedule; only the report is wrong."""
    numbers = TrainedSteps.numbers
    monkeypatch.setattr(TrainedSteps, "numbers", lambda self, name: [value or 0.5 for value in numbers(self, name)])
    assert "step" in broken(subject(), "rates")["rates"]


def test_a_small_run_draws_random_numbers() -> None:
    """Without dropout, no property of a step would show that a kind draws other numbers."""
    run = load_run(small_run("optimizer", {"kind": "sgd", "lr": 0.1}), WITH_PLUGINS)
    model, ids = tfkit.build(run.graph).train(), torch.arange(8)[None]
    assert not torch.equal(model(ids), model(ids))


@dataclass(frozen=True)
class Bug:
    """A replaced attribute, and the property that must see it."""

    words: str
    red: str
    owner: Any
    name: str
    instead: Any
    sets: tuple[str, ...] = field(default=())


def _clip(parameters: Any, limit: float) -> torch.Tensor:
    return CLIP(list(parameters)[:2], limit)


def _with_equal_dropout(*args: Any) -> Any:
    torch.manual_seed(0)
    return TENSORS(*args)


def _in_eval_mode(model: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    numbers = EVALUATE(model, *args, **options)
    model.eval()
    return numbers


def _nudged(self: Ema, training: Any, numbers: Any) -> None:
    with torch.no_grad():
        next(training.model.parameters()).add_(1e-3)


def _of_all(self: ExactMatch, values: torch.Tensor, targets: torch.Tensor) -> Ratio:
    return Ratio(int((values | (targets == -100)).all(-1).sum()), len(targets))


def _of_company(self: Any, indices: Ids) -> Batch:
    batch = BATCH(self, indices)
    return replace(batch, inputs={name: (ids + len(indices)) % 12 for name, ids in batch.inputs.items()})


def _without_clip(self: RunSpec) -> Mapping[str, Any]:
    return {name: value for name, value in MATERIAL(self).items() if name != "clip"}


def _muon(**update: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda self, groups: MUON_BUILD(self.model_copy(update=update), groups)


def _adamw(**update: Any) -> Callable[..., torch.optim.Optimizer]:
    return lambda self, groups: ADAMW_BUILD(self.model_copy(update=update), groups)


SHIFTED = (
    "data={kind: packed, separator: 10, of: {kind: addition, digits: 2, loss_on: all}}",
    "model.inputs=[tokens, after]",
    "model.graph.embedding={block: embedding, input: tokens}",
    "model.graph.decoder.attention.position=rope",
    "model.graph.next={block: embedding, input: after, tie: embedding}",
    "model.graph.joined={block: add, inputs: [decoder, next]}",
    "model.graph.later={block: lm_head, input: joined}",
    "model.outputs=[head, later]",
    "loss={kind: cross_entropy, outputs: {head: 1.0, later: {weight: 0.3, shift: 3}}, ahead: {after: 2}}",
    "model.graph.head={block: lm_head, input: decoder}",
)
"""A second output predicts the third token from the second, in rows of two documents."""


def _one_further(name: str) -> Callable[..., Any]:
    def tensors(batch: Batch, model: Any, device: Any, loss: Any) -> Any:
        inputs, targets = TENSORS(batch, model, device, loss)
        if name in inputs:
            return {**inputs, name: inputs[name].roll(-1, 1)}, targets
        return inputs, {**targets, name: targets[name].roll(-1, 1)}

    return tensors


def _of_one_document(*args: Any) -> Any:
    inputs, targets = TENSORS(*args)
    return {name: x | True if x.dtype == torch.bool else x for name, x in inputs.items()}, targets


def _second_next(rows: Ids, **options: Any) -> Batch:
    return replace(NEXT(rows, **options), targets=np.roll(NEXT(rows, **options).targets, -1, 1))


CLIP, TENSORS, EVALUATE, BATCH = torch.nn.utils.clip_grad_norm_, batch_tensors, evaluate_splits, _GuardedExamples.batch
MUON_BUILD, ADAMW_BUILD, LOSS_BUILD = MuonConfig.build, AdamWConfig.build, CrossEntropyConfig.build
MATERIAL, UNCHANGED_LOSS, NEXT = RunSpec.material, CrossEntropyConfig(), tasks.next_tokens
WSD, FACTOR, SHUFFLED, ROWS = WSDConfig.factor, Run.factor, order._shuffled_indices, Batch.rows
BUGS = [
    Bug("only the first weights are clipped", "clipping", torch.nn.utils, "clip_grad_norm_", _clip),
    Bug(
        "a clip below 1 is taken as 1",
        "clipping",
        torch.nn.utils,
        "clip_grad_norm_",
        lambda parameters, limit: CLIP(parameters, max(limit, 1.0)),
    ),
    Bug(
        "epochs are equal", "epochs", order, "_shuffled_indices", lambda seed, _, examples: SHUFFLED(seed, 0, examples)
    ),
    Bug(
        "the first rule applies",
        "groups",
        optimizer,
        "groups_of",
        lambda model, config: groups_of(model, config.model_copy(update={"groups": config.groups[::-1]})),
    ),
    Bug("a shift is one token off", "targets", evaluate, "batch_tensors", _one_further("later"), SHIFTED),
    Bug("an input ahead is one token off", "targets", evaluate, "batch_tensors", _one_further("after"), SHIFTED),
    Bug("a row is one document", "targets", evaluate, "batch_tensors", _of_one_document, SHIFTED),
    Bug("targets of the data are one token off", "targets", tasks, "next_tokens", _second_next),
    Bug("micro-batches have equal dropout", "noise", evaluate, "batch_tensors", _with_equal_dropout),
    Bug(
        "the decay begins a step late",
        "schedule",
        WSDConfig,
        "factor",
        lambda self, step, steps: WSD(self, step - (step > steps - 10), steps),
    ),
    Bug("rates are a step late", "rates", Run, "factor", lambda self, n: FACTOR(self, max(n - 1, 1))),
    Bug("Muon ignores its scale", "optimizer", MuonConfig, "build", _muon(scale="original"), (MUON,)),
    Bug("Muon ignores Nesterov", "optimizer", MuonConfig, "build", _muon(nesterov=True), (MUON,)),
    Bug("Muon ignores an option", "options", MuonConfig, "build", _muon(nesterov=False), (MUON,)),
    Bug("betas are exchanged", "optimizer", AdamWConfig, "build", _adamw(betas=(0.999, 0.9))),
    Bug(
        "smoothing is ignored", "loss", CrossEntropyConfig, "build", lambda _, model: LOSS_BUILD(UNCHANGED_LOSS, model)
    ),
    Bug("a loss ignores options", "options", CrossEntropyConfig, "build", lambda _, m: LOSS_BUILD(UNCHANGED_LOSS, m)),
    Bug(
        "micro-batches leave a row out",
        "sums",
        Batch,
        "rows",
        lambda self, start, end: ROWS(self, start, max(end - (start > 0), start + 1)),
    ),
    Bug("the state of spikes is a loss short", "resume", Spikes, "state", lambda self: {"losses": [*self._losses][1:]}),
    Bug("the clip is immaterial", "digest", RunSpec, "material", _without_clip),
    Bug("an example without an answer is right", "metrics", ExactMatch, "sums", _of_all),
    Bug("an evaluation ends train mode", "evaluation", loop, "evaluate_splits", _in_eval_mode),
    Bug("a callback changes a weight", "callbacks", Ema, "on_step", _nudged),
    Bug("an example depends on its batch", "examples", _GuardedExamples, "batch", _of_company),
    Bug(
        "rates are doubled at any size",
        "parametrization",
        MuPConfig,
        "factors",
        lambda self, growth, optimizer: tfkit.Factors(lr=2.0),
        ("parametrization={kind: mup, base: {model.d_model: 8}}",),
    ),
    Bug("no weight moves", "steps", torch.optim.AdamW, "step", lambda self: None),
]


QUICK_BUGS = (
    "only the first weights are clipped",
    "the decay begins a step late",
    "a shift is one token off",
    "an input ahead is one token off",
)


@pytest.mark.parametrize(
    "bug", chosen(BUGS, [bug for bug in BUGS if bug.words in QUICK_BUGS]), ids=lambda bug: bug.words
)
def test_the_property_breaks(bug: Bug, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bug.owner, bug.name, bug.instead)
    result = measured(subject(*bug.sets), bug.red)[bug.red]
    assert result.status == "failed", "no property sees it"
    assert result.detail


def indices_of(order_name: Order, seed: int) -> list[int]:
    """Return the indices of the examples of a run, in as many steps as the property `epochs` reads."""
    sizes, steps = StepValues((0,), (SEQUENCES,)), -(-data.EPOCHS * EXAMPLES // SEQUENCES)
    batches = [order.indices_of(order_name, seed, step + 1, sizes, examples=EXAMPLES) for step in range(steps)]
    return [int(index) for indices in batches for index in indices]


def repeated(indices: list[int], size: int) -> list[int]:
    """Repeat the first indices."""
    return (indices[:size] * len(indices))[: len(indices)]


@pytest.mark.parametrize(
    ("faulty_order", "changed", "detail"),
    [
        ("sampled", lambda seed: indices_of("sampled", 0), "sampled, a different seed draws the same examples"),
        ("sampled", lambda seed: repeated(indices_of("sampled", seed), SEQUENCES), "sampled, every step has the same"),
        ("shuffled", lambda seed: indices_of("shuffled", 0), "shuffled, a different seed draws the same examples"),
        ("shuffled", lambda seed: repeated(indices_of("shuffled", seed), EXAMPLES), "shuffled, epochs 1 and 2"),
        ("shuffled", lambda seed: indices_of("sampled", seed), "shuffled, epoch 1 does not have every example once"),
        ("sequential", lambda seed: indices_of("sequential", seed)[::-1], "in sequence, the examples are not in their"),
        ("", None, ""),
    ],
)  # fmt: skip
def test_each_order_of_examples_is_measured(
    faulty_order: str, changed: Any, detail: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = lambda _, name, seed: changed(seed) if name == faulty_order else indices_of(name, seed)  # noqa: E731
    monkeypatch.setattr(data, "_taken_indices", taken)
    run = SimpleNamespace(config=SimpleNamespace(seed=3), data=SimpleNamespace(examples=lambda *_: range(EXAMPLES)))
    details = [deviation.detail for deviation in data.epoch_order.measure(cast(Any, SimpleNamespace(run=run)))]
    assert details[0].startswith(detail)
    assert bool(details[0]) is bool(faulty_order)


@pytest.mark.parametrize(("step", "part"), [(1, "weights"), (2, "weights"), (2, "optimizer"), (2, "tensors")])
def test_a_run_resumes_from_each_of_its_checkpoints(step: int, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def checkpoint(number: int, value: float) -> Any:
        parts = {
            name: {"w": torch.tensor(value if name == part else 1.0)} for name in ("weights", "optimizer", "tensors")
        }
        return SimpleNamespace(step=number, callbacks=(), **parts)

    def train(run: object, start: Any = None) -> Any:
        last = checkpoint(4, 1.5 if start is not None and start.step == step else 1.0)
        checkpoints = [*(checkpoint(number, 1.0) for number in (1, 2, 3)), last]
        return SimpleNamespace(hidden={}, notes=SimpleNamespace(checkpoints=checkpoints, positions=[0, 0, 0], lines=[]))

    monkeypatch.setattr(record, "train_reduced_run", train)
    run = SimpleNamespace(config=SimpleNamespace(callbacks=()))
    checked = cast(Any, SimpleNamespace(callbacks=(), changed=lambda values: run))
    failures = [deviation for deviation in record.resumed_run.measure(checked) if deviation.error > 0]
    assert len(failures) == 1
    assert failures[0].detail.startswith(f"resumed after step {step}, ")


def test_each_property_sees_a_bug() -> None:
    """`decay` has the tests below, `numbers` test_by_step.py, and `parametrization` test_parametrization.py."""
    tested = {"decay", "numbers", "parametrization"}
    assert {prop.name for prop in PROPERTIES if prop.of == "run"} == {*(bug.red for bug in BUGS), *tested}


SIGNED = '''
"""Steps along the sign of the gradient."""

from typing import Any, Literal

import torch

import tfkit
import tfkit.testing


class Signed(torch.optim.Optimizer):
    def __init__(self, groups, lr, weight_decay):
        super().__init__(groups, {"lr": lr})
        self.weight_decay = weight_decay

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for weight in group["params"]:
                weight.mul_(1 - DECAY)
                weight.sub_(group["lr"] * weight.grad.sign())


class SignedConfig(tfkit.OptimizerConfig):
    """Steps along the sign of the gradient."""

    kind: Literal["signed"] = "signed"

    def build(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return Signed(groups, self.lr, self.weight_decay)


@tfkit.hookimpl
def tfkit_register(register):
    register(SignedConfig)
'''


@pytest.mark.parametrize(
    ("decay", "words"),
    some(
        [
            ("group['weight_decay']", "`weight_decay` 0.1 at the learning rate 0.01 must shrink"),
            ("group['lr'] * group['weight_decay']", ""),
            ("group['lr'] * self.weight_decay", "decays, although its group has `weight_decay: 0`"),
            ("0", "does not decay: `weight_decay` of its group has no effect"),
            ("group['lr'] ** 2 * group['weight_decay']", "in a step, or act as 0.1 times the weight in its gradient"),
        ],
        2,
    ),
)
def test_the_decay_of_a_plugin(decay: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "signed.py").write_text(SIGNED.replace("DECAY", decay), encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    run = load_run({**RUN, "optimizer": {"kind": "signed", "lr": 0.01, "weight_decay": 0.1}}, plugins)
    faults = broken(reduced_run(run, plugins), "groups", "decay")
    assert faults.keys() == ({"decay"} if words else set())
    assert words in faults.get("decay", "")
    assert faults.get("decay", "optimizer kind `signed`").startswith("optimizer kind `signed`")


def signed_steps(config: Any, weight: Any, gradients: Any, rates: Any, decay: float) -> Any:
    """The formula of the plugin."""
    for gradient, rate in zip(gradients, rates, strict=True):
        weight = (1 - rate * decay) * weight - rate * np.sign(gradient)
    return weight


@pytest.mark.slow
@pytest.mark.parametrize("decay", ["group['lr'] * group['weight_decay']", "group['lr'] * group['weight_decay'] / 2"])
def test_a_kind_of_a_plugin_in_the_kit(decay: str, tmp_path: Path) -> None:
    (tmp_path / "signed.py").write_text(SIGNED.replace("DECAY", decay), encoding="utf-8")
    plugins = tfkit.load_plugins(plugin_dirs=[tmp_path], entry_points=False)
    config = plugins.registry.kinds("optimizer")["signed"].config
    mark: Any = tfkit.testing.parametrize_with_checks(config, plugins=plugins, reference=signed_steps)
    checks = {case.id: case.values[0] for case in mark.args[1]}
    assert checks.keys() == {prop.name for prop in PROPERTIES if prop.of == "run"}
    if decay.endswith("2"):
        with pytest.raises(AssertionError, match=r"5 steps of .* differ from the formula"):
            checks["optimizer"]()
    else:
        checks["optimizer"]()
        checks["resume"]()


@pytest.mark.parametrize("kind", ["masked_diffusion", "flow_matching", "preferences"])
def test_a_kind_that_does_not_fit_the_small_run_is_checked_in_a_run(kind: str) -> None:
    config = WITH_PLUGINS.registry.kinds("loss" if "_" in kind else "data")[kind].config
    with pytest.raises(SpecError, match=r"check a run with a suitable model and suitable data.*`tfkit check RUN`"):
        RunSubject().around(config, WITH_PLUGINS, options={})

"""Adam and Muon, compared with torch's optimizers on explicitly grouped parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import tfkit
from tests.run.training.runs import Memory, same, trained
from tfkit.errors import SpecError
from tfkit.nn import StackedLinear
from tfkit.run.kinds.optimizers import Muon, MuonConfig
from tfkit.run.training.loop import Trainer
from tfkit.run.training.optimizer import _matrix_rows, groups_of, matrices_of

from .small import small_run

DATA = "{kind: addition}"
MUON = "{kind: muon, lr: 0.02, weight_decay: 0.1, others: {kind: adamw, lr: 3e-3, weight_decay: 0.2}}"


def model_of(run: Any) -> fx.GraphModule:
    return tfkit.build(run.graph, seed=1)


def gradients(model: fx.GraphModule, step: int) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(step)
    return {name: torch.randn(parameter.shape, generator=random) for name, parameter in model.named_parameters()}


def updated(run: Any, steps: int = 4) -> dict[str, Tensor]:
    """The weights after some steps of the run's optimizer on random gradients, at a falling rate."""
    model, config = model_of(run), run.config.optimizer
    optimizer = config.build(groups_of(model, config))
    rates = [group["lr"] for group in optimizer.param_groups]
    for step in range(steps):
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def test_adam_is_that_of_torch(tmp_path: Path) -> None:
    run = small_run(
        tmp_path, DATA, optimizer="{kind: adam, lr: 0.01, betas: [0.8, 0.95], eps: 1e-7, weight_decay: 0.1}"
    )
    model = model_of(run)
    groups = tfkit.parameter_groups(model, weight_decay=0.1)
    optimizer = torch.optim.Adam(groups, lr=0.01, betas=(0.8, 0.95), eps=1e-7)
    for step in range(4):
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        optimizer.step()
    torch.testing.assert_close(updated(run), {name: parameter.detach() for name, parameter in model.named_parameters()})


@pytest.mark.parametrize(
    ("text", "build"),
    [
        (
            "sgd, lr: 0.02, momentum: 0.8, nesterov: true",
            lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.8, nesterov=True),
        ),
        ("sgd, lr: 0.02, momentum: 0.8", lambda groups: torch.optim.SGD(groups, lr=0.02, momentum=0.8)),
        (
            "adamw, lr: 0.01, betas: [0.7, 0.9], eps: 1e-4",
            lambda groups: torch.optim.AdamW(groups, lr=0.01, betas=(0.7, 0.9), eps=1e-4),
        ),
    ],
)
def test_every_option_is_passed_to_torch(
    text: str, build: Callable[..., torch.optim.Optimizer], tmp_path: Path
) -> None:
    run = small_run(tmp_path, DATA, optimizer=f"{{kind: {text}, weight_decay: 0.1}}")
    model = model_of(run)
    optimizer = build(tfkit.parameter_groups(model, weight_decay=0.1))
    rate = optimizer.param_groups[0]["lr"]
    for step in range(4):
        for name, gradient in gradients(model, step).items():
            model.get_parameter(name).grad = gradient
        for group in optimizer.param_groups:
            group["lr"] = rate / (1 + step)
        optimizer.step()
    torch.testing.assert_close(updated(run), {name: parameter.detach() for name, parameter in model.named_parameters()})


def test_muon_is_that_of_torch_on_every_matrix_and_adamw_on_the_rest(tmp_path: Path) -> None:
    run = small_run(tmp_path, DATA, optimizer=MUON)
    model = model_of(run)
    inside = ("attention.project.qkv", "attention.output", "ffn.up", "ffn.down")
    layers = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name.endswith(tuple(f"{x}.weight" for x in inside))
    }
    assert len(layers) == 4
    apart = {
        (name, number): torch.nn.Parameter(part.clone())
        for name, parameter in layers.items()
        for number, part in enumerate(parameter.detach().chunk(3 if "qkv" in name else 1))
    }
    muon = torch.optim.Muon(list(apart.values()), lr=0.02, weight_decay=0.1)
    head = model.get_parameter("head.output.weight")
    rest = [parameter for name, parameter in model.named_parameters() if name not in layers and parameter is not head]
    groups = [{"params": [head], "weight_decay": 0.2}, {"params": rest, "weight_decay": 0.0}]
    adamw = torch.optim.AdamW(groups, lr=3e-3)
    for step in range(4):
        drawn = gradients(model, step)
        for (name, number), parameter in apart.items():
            parameter.grad = drawn[name].chunk(3 if "qkv" in name else 1)[number].clone()
        for name, gradient in drawn.items():
            if name not in layers:
                model.get_parameter(name).grad = gradient
        for group in (*muon.param_groups, *adamw.param_groups):
            group["lr"] = (0.02 if group in muon.param_groups else 3e-3) / (1 + step)
        muon.step()
        adamw.step()
    expected = {name: parameter.detach() for name, parameter in model.named_parameters() if name not in layers}
    for name in layers:
        expected[name] = torch.cat([parameter.detach() for (owner, _), parameter in apart.items() if owner == name])
    actual = updated(run)
    torch.testing.assert_close(actual, {name: expected[name] for name in actual}, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("options", ["nesterov: false", "scale: match_rms_adamw", "momentum: 0.5, iterations: 3"])
def test_muon_passes_its_options_to_torch(options: str, tmp_path: Path) -> None:
    run = small_run(tmp_path, DATA, optimizer=MUON.replace("lr: 0.02", f"lr: 0.02, {options}"))
    config, name = run.config.optimizer, "decoder.layers.0.ffn.down.weight"
    assert isinstance(config, MuonConfig)
    model = model_of(run)
    muon = torch.optim.Muon(
        [model.get_parameter(name)],
        lr=0.02,
        weight_decay=0.1,
        momentum=config.momentum,
        nesterov=config.nesterov,
        ns_steps=config.iterations,
        adjust_lr_fn=config.scale,
    )
    for step in range(4):
        muon.param_groups[0]["lr"] = 0.02 / (1 + step)
        model.get_parameter(name).grad = gradients(model, step)[name]
        muon.step()
    torch.testing.assert_close(updated(run)[name], model.get_parameter(name).detach(), atol=1e-6, rtol=1e-5)


def test_each_expert_is_a_matrix_of_muon() -> None:
    layer = StackedLinear(3, 6, {"gate": 4, "up": 4}, bias=False)
    weight = nn.Parameter(torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(0)))
    experts = [nn.Parameter(part.clone()) for expert in weight.detach() for part in expert.split(4)]
    rest = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    group = {"params": [weight], "lr": 0.1, "weight_decay": 0.0, "matrices": [_matrix_rows(layer)]}
    muon = Muon([group], rest, {"momentum": 0.9})
    expected = torch.optim.Muon(experts, lr=0.1, weight_decay=0.0, momentum=0.9)
    for step in range(3):
        weight.grad = torch.randn(3, 8, 6, generator=torch.Generator().manual_seed(step))
        for expert, gradient in zip(experts, weight.grad.flatten(0, 1).split(4), strict=True):
            expert.grad = gradient.clone()
        muon.step()
        expected.step()
    torch.testing.assert_close(weight.detach(), torch.cat(list(experts)).detach().reshape(3, 8, 6))


def test_the_last_of_several_rules_applies(tmp_path: Path) -> None:
    """A weight decay of 0 in a rule is a value, not the absence of one."""
    rules = (
        "[{match: '*', lr: 0.5, weight_decay: 0.3}, {match: '*ffn*', lr: 0.25}, {match: '*ffn.down*', weight_decay: 0}]"
    )
    run = small_run(tmp_path, DATA, optimizer=f"{{kind: adamw, lr: 1e-2, groups: {rules}}}")
    model = model_of(run)
    settings = {
        parameter: (group["lr"], group["weight_decay"])
        for group in groups_of(model, run.config.optimizer)
        for parameter in group["params"]
    }
    assert settings[model.get_parameter("decoder.layers.0.ffn.up.weight")] == (0.25, 0.3)
    assert settings[model.get_parameter("decoder.layers.0.ffn.down.weight")] == (0.25, 0)
    assert settings[model.get_parameter("decoder.layers.0.attention.output.weight")] == (0.5, 0.3)


def test_what_muon_gathers_is_written_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = small_run(tmp_path, DATA, optimizer=MUON)
    expected = updated(run)
    monkeypatch.setattr("tfkit.run.kinds.optimizers.full_tensor", torch.clone)
    assert same(updated(run), expected)


def test_a_run_with_muon_continues_to_the_same_bits(tmp_path: Path) -> None:
    run = small_run(tmp_path, DATA, "steps=6", optimizer=MUON)
    _, uninterrupted = trained(run)
    memory, _ = trained(run, until=3)
    _, continued = trained(run, Memory(memory.saved))
    assert same(uninterrupted, continued)


def test_the_matrices_inside_a_model(tmp_path: Path) -> None:
    model = model_of(small_run(tmp_path, DATA))
    names = {parameter: name for name, parameter in model.named_parameters()}
    actual = {
        names[parameter].removeprefix("decoder.layers.0."): rows for parameter, rows in matrices_of(model).items()
    }
    assert actual == {
        "attention.project.qkv.weight": (16, 16, 16),
        "attention.output.weight": (16,),
        "ffn.up.weight": (32,),
        "ffn.down.weight": (16,),
    }


def test_some_matrices_have_a_rate_of_their_own(tmp_path: Path) -> None:
    """Each steps as with that rate for all."""
    run = small_run(tmp_path, DATA, optimizer=f"{MUON[:-1]}, groups: [{{match: '*ffn.*weight', lr: 0.5}}]}}")
    usual, fast = (updated(small_run(tmp_path, DATA, optimizer=MUON.replace("0.02", rate))) for rate in ("0.02", "0.5"))
    ffn = [name for name in usual if "ffn." in name and name.endswith("weight")]
    assert same(updated(run), {**usual, **{name: fast[name] for name in ffn}})


def test_rules_are_for_both(tmp_path: Path) -> None:
    text = MUON[:-1] + ", groups: [{match: '*ffn*', lr: 0.5}, {match: 'head*', weight_decay: 0.7}]}"
    run = small_run(tmp_path, DATA, optimizer=text)
    model = model_of(run)
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = groups_of(model, run.config.optimizer)
    actual = {
        names[parameter]: (group["lr"], group["weight_decay"]) for group in groups for parameter in group["params"]
    }
    assert actual["decoder.layers.0.ffn.up.weight"] == (0.5, 0.1)
    assert actual["decoder.layers.0.ffn.up.bias"] == (0.5, 0.0)
    assert actual["decoder.layers.0.attention.output.weight"] == (0.02, 0.1)
    assert actual["head.output.weight"] == (3e-3, 0.7)
    assert actual["embedding.tokens.weight"] == (3e-3, 0.0)


@pytest.mark.parametrize(
    "text",
    [
        "{kind: muon, lr: 0.02}",
        MUON[:-1] + ", groups: [{match: '*atention*', lr: 0.5}]}",
        "{kind: muon, lr: 0.02, others: {kind: adamw, lr: 1e-3, groups: [{match: head*, lr: 1.0}]}}",
        f"{{kind: muon, lr: 0.02, others: {MUON}}}",
    ],
    ids=["others_missing", "no_match", "rules_of_others", "muon_twice"],
)
def test_errors(text: str, tmp_path: Path, golden: Callable[[str, str], None], request: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecError) as raised:
        Trainer(small_run(Path(), DATA, optimizer=text), Memory())
    golden(f"runs/muon_{request.node.callspec.id}", str(raised.value))

"""Samples of flow matching, against exact flows, independent loops, and the scheduler of diffusers."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, fx

import tfkit

from ..run.training.runs import WITH_PLUGINS

SPEC: dict[str, Any] = {
    "tfkit": 1,
    "name": "velocities",
    "d_model": 16,
    "inputs": {
        "point": {"type": "vector", "width": 3},
        "time": {"type": "vector", "width": 6},
        "label": {"type": "vector", "width": 5},
    },
    "graph": {
        "of_point": {"block": "linear", "input": "point"},
        "of_time": {"block": "linear", "input": "time"},
        "of_label": {"block": "linear", "input": "label", "bias": False},
        "sum": {"block": "add", "inputs": ["of_point", "of_time", "of_label"]},
        "hidden": {"block": "linear", "input": "sum", "activation": "silu"},
        "velocity": {"block": "linear", "input": "hidden", "d_model": 3},
    },
}
LABELS = [3, 0, 4, 3]


def model_of(**changes: Any) -> fx.GraphModule:
    """A model of velocities whose weights are large enough for curved flows."""
    model = tfkit.build({**SPEC, **changes}, seed=1)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            weight.copy_(0.4 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)))
    return model


def velocity_of(model: fx.GraphModule, x: Tensor, level: float, label: int | None, scale: float = 1000.0) -> Tensor:
    """The velocity at a point [3], written anew: the model takes cosines, then sines, and a row of the identity."""
    angles = [scale * level * 10_000.0 ** (-i / 3) for i in range(3)]
    time = torch.tensor([*map(math.cos, angles), *map(math.sin, angles)], dtype=x.dtype)
    one_hot = torch.zeros(5, dtype=x.dtype)
    if label is not None:
        one_hot[label] = 1
    return model(point=x[None], time=time[None], label=one_hot[None])[0]


class Gaussian(tfkit.FlowModel):
    """The exact velocities from a normal distribution of examples with another mean and deviation."""

    mean, std = 0.7, 0.3

    def velocities(self, x: Tensor, levels: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        s = levels[:, None].double()
        variance = (1 - s) ** 2 * self.std**2 + s**2
        return ((s - (1 - s) * self.std**2) / variance * (x - (1 - s) * self.mean) - self.mean).float()


def test_samples_of_a_gaussian_are_scaled_noise() -> None:
    flow = Gaussian(model_of(), label="label")
    noise = tfkit.sample_flow(Zero(model_of(), label="label"), 5, seed=2)
    errors = {}
    for method in ("euler", "heun"):
        for steps in (20, 40):
            samples = tfkit.sample_flow(flow, 5, steps=steps, method=method, seed=2)
            errors[method, steps] = float((samples - (0.7 + 0.3 * noise)).abs().max())
    assert errors["heun", 40] < 1e-3
    assert 1.8 < errors["euler", 20] / errors["euler", 40] < 2.3  # first order
    assert 3.5 < errors["heun", 20] / errors["heun", 40] < 5.5  # second order


class Zero(tfkit.FlowModel):
    """Velocities of 0, with which samples are the noise."""

    def velocities(self, x: Tensor, levels: Tensor, labels: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        return torch.zeros_like(x)


@pytest.mark.parametrize("method", ["euler", "heun"])
@pytest.mark.parametrize("guidance", [0.4, 1.0, 2.5])
def test_steps_equal_an_independent_loop(method: Any, guidance: float) -> None:
    model, expected = model_of().double(), []
    flow = tfkit.FlowModel(model, label="label", scale=3.0)
    noise = tfkit.sample_flow(Zero(model, label="label"), 4, seed=7).double()
    grid = [1.0, 0.75, 0.5, 0.25, 0.0]
    with torch.no_grad():
        for x, label in zip(noise, LABELS, strict=True):

            def slope(x: Tensor, level: float, label: int = label) -> Tensor:
                of_none = velocity_of(model, x, level, None, 3.0)
                return (1 - guidance) * of_none + guidance * velocity_of(model, x, level, label, 3.0)

            end = x
            for level, following in pairwise(grid):
                first = slope(end, level)
                last = slope(end - 0.25 * first, following) if method == "heun" else first
                end = end - 0.125 * first - 0.125 * last
            expected.append(end)
    samples = tfkit.sample_flow(flow, 4, steps=4, method=method, labels=LABELS, guidance=guidance, seed=7)
    assert float((torch.stack(expected) - noise).abs().max()) > 0.5
    torch.testing.assert_close(samples, torch.stack(expected), rtol=0, atol=1e-9)


@pytest.mark.slow  # diffusers takes four seconds to import
def test_steps_equal_the_scheduler_of_diffusers() -> None:
    diffusers = pytest.importorskip("diffusers")
    embeddings = pytest.importorskip("diffusers.models.embeddings")
    model = model_of().double()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler()
    scheduler.set_timesteps(sigmas=np.linspace(1, 1 / 8, 8).tolist())
    x = tfkit.sample_flow(Zero(model, label="label"), 4, seed=7).double()
    with torch.no_grad():
        for time in scheduler.timesteps:
            level = float(time) / 1000
            velocities = [velocity_of(model, point, level, label) for point, label in zip(x, LABELS, strict=True)]
            x = scheduler.step(torch.stack(velocities), time, x).prev_sample
    samples = tfkit.sample_flow(tfkit.FlowModel(model, label="label"), 4, steps=8, labels=LABELS, seed=7)
    torch.testing.assert_close(samples, x, rtol=0, atol=1e-6)  # the scheduler adds steps to samples in float32
    times = embeddings.get_timestep_embedding(torch.tensor([437.5]), 6, flip_sin_to_cos=True, downscale_freq_shift=0)
    angles = [437.5 * 10_000.0 ** (-i / 3) for i in range(3)]
    assert times[0].tolist() == pytest.approx([*map(math.cos, angles), *map(math.sin, angles)], abs=1e-4)


def test_a_sample_depends_only_on_the_seed_and_its_index() -> None:
    flow = tfkit.FlowModel(model_of(), label="label")
    more = tfkit.sample_flow(flow, 4, steps=3, labels=LABELS)
    torch.testing.assert_close(tfkit.sample_flow(flow, 2, steps=3, labels=LABELS[:2]), more[:2])
    assert not torch.equal(more[0], more[3])
    assert not torch.allclose(tfkit.sample_flow(flow, 4, steps=3, labels=LABELS, seed=1), more, atol=0.1)
    assert flow.module.training


SEQUENCES: dict[str, Any] = {
    "tfkit": 1,
    "name": "sequences",
    "requires": ["tfkit-streams"],
    "d_model": 8,
    "d_condition": 8,
    "inputs": {"point": {"type": "features", "width": 3}, "time": {"type": "vector", "width": 1}},
    "graph": {
        "of_point": {"block": "linear", "input": "point"},
        "condition": {"block": "linear", "input": "time"},
        "encoder": {
            "block": "encoder",
            "input": "of_point",
            "condition": "condition",
            "n_layers": 1,
            "norm": "adaptive",
            "residual": "modulated",
            "attention": {"kind": "mha", "n_heads": 2, "position": "rope"},
            "ffn": {"kind": "gelu", "d_ff": 16},
        },
        "velocity": {"block": "linear", "input": "encoder", "d_model": 3},
    },
}


def test_samples_of_sequences_have_a_length() -> None:
    flow = tfkit.FlowModel(tfkit.build(tfkit.load(SEQUENCES, plugins=WITH_PLUGINS)), scale=1.0)
    assert tfkit.sample_flow(flow, 2, steps=2, length=4).shape == (2, 4, 3)
    with pytest.raises(ValueError, match="`length` is missing: the samples can have any length"):
        tfkit.sample_flow(flow, 2)
    fixed = {**SEQUENCES, "inputs": {**SEQUENCES["inputs"], "point": {"type": "features", "width": 3, "length": 5}}}
    flow = tfkit.FlowModel(tfkit.build(tfkit.load(fixed, plugins=WITH_PLUGINS)), scale=1.0)
    assert tfkit.sample_flow(flow, 2, steps=2).shape == (2, 5, 3)
    with pytest.raises(ValueError, match="`length` has no effect"):
        tfkit.sample_flow(flow, 2, length=5)


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({}, {"time": "tmie"}, "`tmie` must be an input of the model that takes a vector; got the inputs point, time"),
        ({}, {}, "a flow must have one input in addition to time; got point, time, label"),
        ({}, {"label": "label", "scale": 0.0}, "`scale` of `FlowModel` must be a number of more than 0; got 0"),
    ],
)
def test_a_model_that_is_no_flow_is_an_error(changes: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfkit.FlowModel(model_of(**changes), **fields)


def test_a_velocity_has_the_shape_of_its_point() -> None:
    graph = {**SPEC["graph"], "velocity": {"block": "linear", "input": "hidden", "d_model": 4}}
    with pytest.raises(ValueError, match="one velocity for `point`, a vector of width 3; got a vector of width 4"):
        tfkit.FlowModel(model_of(graph=graph), label="label")
    inputs = {**SPEC["inputs"], "time": {"type": "vector", "width": 7}}
    with pytest.raises(ValueError, match="the width of `time` must be 1 or even: cosines and sines; got 7"):
        tfkit.FlowModel(model_of(inputs=inputs), label="label")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"labels": [5]}, "`labels` must be 1 classes below 5; got 5"),
        ({"labels": [-1]}, "`labels` must be 1 classes below 5; got -1"),
        ({"labels": [2, 3]}, "`labels` must be 1 classes below 5; got 2, 3"),
        ({"guidance": 2.0}, "`guidance` must be combined with `labels`"),
        ({"length": 4}, "`length` has no effect: the model takes a vector of width 3"),
        ({"method": "heum"}, "heum"),
        ({"labels": [2], "guidance": 1001.0}, "`guidance` of `sample_flow` must be"),
    ],
)
def test_an_argument_that_cannot_be_is_an_error(arguments: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tfkit.sample_flow(tfkit.FlowModel(model_of(), label="label"), 1, **arguments)

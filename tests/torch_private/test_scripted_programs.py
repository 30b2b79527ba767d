"""What `tests/conftest.py` uses to let go of scripted programs after each test."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.jit import _recursive, _state

from tfkit.torch_private.torchscript import forget_classes

from ..conftest import pytest_runtest_teardown


def test_scripted_programs_are_let_go_and_those_in_use_still_run() -> None:
    # A store from before a `gc.freeze` of another test would never be collected.
    _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
    x = torch.randn(2, 3)
    program = torch.jit.script(nn.Sequential(nn.Linear(3, 5), nn.ReLU()))
    expected = program(x)
    unit = weakref.ref(_recursive.concrete_type_store)
    assert _recursive.concrete_type_store.type_store
    pytest_runtest_teardown()
    gc.collect()
    assert unit() is None
    assert not _recursive.concrete_type_store.type_store
    assert _recursive._python_cu is _state._python_cu
    assert torch.equal(program(x), expected)
    assert torch.equal(torch.jit.script(nn.ReLU())(x), x.relu())


class Resize(nn.Module):
    """Calls a function of torch that has overloads."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.interpolate(x, size=[5, 7])


@pytest.mark.slow
def test_functions_with_overloads_can_be_scripted_again() -> None:
    x = torch.randn(1, 2, 3, 4)
    for _ in range(2):
        assert torch.equal(torch.jit.script(Resize())(x), Resize()(x))
        pytest_runtest_teardown()


def test_classes_are_discarded_from_a_store_that_was_replaced() -> None:
    forget_classes()
    _recursive.concrete_type_store = _recursive.ConcreteTypeStore()
    torch.jit.script(nn.ReLU())
    assert _recursive.concrete_type_store.type_store
    forget_classes()
    assert not _recursive.concrete_type_store.type_store

"""The behaviour of torch's private names on which tfkit relies: a failure shows what a new version of torch changed."""

from __future__ import annotations

import copy
import linecache
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, fx, nn
from torch.autograd import forward_ad
from torch.fx.graph_module import _loader
from torch.nn import functional as F
from torch.profiler import profile
from torch.utils.flop_counter import FlopCounterMode

from tfkit.torch_private import compiler, dispatch, hooks, onednn, sharding, tensors, torchscript, transforms

# ---- transforms ----


def test_a_transform_is_seen_and_only_while_it_runs() -> None:
    calls: list[tuple[bool, bool]] = []

    def square(x: Tensor) -> Tensor:
        calls.append((transforms.is_transformed(), transforms.is_watched()))
        return (x * x).sum()

    square(torch.ones(2))
    torch.func.grad(square)(torch.ones(2))
    torch.func.vmap(square)(torch.ones(2, 2))
    square(torch.ones(2))
    assert calls == [(False, False), (True, True), (True, True), (False, False)]


def test_forward_mode_and_dispatch_modes_watch() -> None:
    assert not transforms.is_watched()
    with forward_ad.dual_level():
        assert transforms.is_watched()
        assert not transforms.is_transformed()
    with FlopCounterMode(display=False):
        assert transforms.is_watched()
    assert not transforms.is_watched()


# ---- onednn ----


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch was built without oneDNN")
@pytest.mark.parametrize("bias", [False, True])
def test_onednn_multiplies_as_linear_does(bias: bool) -> None:
    x, weight, b = torch.randn(3, 2, 8), torch.randn(16, 8), torch.randn(16) if bias else None
    scripted = torch.jit.script(onednn.scripted_linear)
    for actual in (onednn.linear(x, weight, b), scripted(x, weight, b)):
        torch.testing.assert_close(actual, F.linear(x, weight, b))


# ---- dispatch ----


class Seen(dispatch.DispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.forward: list[Any] = []
        self.backward: list[tuple[Any, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        node = dispatch.running_node()
        if node is None:
            self.forward.append(func)
        else:
            self.backward.append((func, dispatch.number_of(node)))
        return func(*args, **(kwargs or {}))


def test_a_node_of_the_backward_has_the_number_of_its_place_in_the_forward() -> None:
    x = torch.randn(2, 2, requires_grad=True)
    with Seen() as context:
        before = dispatch.next_number()
        y = x @ x
        between = dispatch.next_number()
        z = y.exp()
        z.sum().backward()
    aten = torch.ops.aten
    assert before < between
    assert {aten.mm.default, aten.exp.default} <= set(context.forward)
    numbers = dict(context.backward)
    assert before <= numbers[aten.mm.default] < between <= numbers[aten.mul.Tensor]
    assert dispatch.running_node() is None


def test_operations_say_what_they_change_and_what_they_show() -> None:
    aten = torch.ops.aten
    assert dispatch.is_mutable(aten.add_.Tensor)
    assert not dispatch.is_mutable(aten.add.Tensor)
    assert [dispatch.is_view(value) for value in (aten.view.default, aten.t.default, dispatch.UNSAFE_VIEW)] == [
        True
    ] * 3
    assert [dispatch.is_view(value) for value in (aten.add.Tensor, aten.add_.Tensor, aten.clone.default)] == [False] * 3


def test_the_operations_are_those_of_the_public_functions() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with Seen() as context:
        x.softmax(1).sum().backward()
        x.log_softmax(1).sum().backward()
        x.to(torch.float64)
    assert {dispatch.SOFTMAX, dispatch.LOG_SOFTMAX, dispatch.TO_COPY} <= set(context.forward)
    assert {dispatch.SOFTMAX_BACKWARD, dispatch.LOG_SOFTMAX_BACKWARD} <= {func for func, _ in context.backward}
    hidden = torch.full((1, 2), -torch.inf)
    torch.testing.assert_close(dispatch.SAFE_SOFTMAX(hidden, -1), torch.zeros(1, 2))


def test_a_quick_range_is_an_event_with_its_name() -> None:
    with profile() as context, dispatch.QuickRange("decoder.layers.0"):
        torch.ones(2).exp()
    events = {event.name: event for event in context.events()}
    range, exp = events["decoder.layers.0"], events["aten::exp"]
    assert range.time_range.start <= exp.time_range.start <= exp.time_range.end <= range.time_range.end


# ---- compiler ----


def test_a_backend_by_name_and_sizes_that_were_equal_once() -> None:
    captured = []

    def count(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        captured.append(graph)
        return compiler.backend_function("eager")(graph, examples)

    torch.compiler.reset()
    compiled = torch.compile(lambda x, y: x.sum() + 2 * y.sum(), backend=count, dynamic=True, fullgraph=True)
    with compiler.distinct_sizes():
        for x, y in ((4, 4), (5, 7), (6, 6)):
            torch.testing.assert_close(compiled(torch.ones(x), torch.ones(y)), torch.tensor(float(x + 2 * y)))
    assert len(captured) == 1


def test_modes_are_those_that_compile_takes() -> None:
    assert {"default", "reduce-overhead", "max-autotune"} <= set(compiler.compile_modes())
    for mode in compiler.compile_modes():
        torch.compile(nn.Identity(), mode=mode)


def test_a_tensor_that_stays_in_place_is_known_to_the_compiler() -> None:
    result = []

    def look(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Any:
        arguments = [node.meta["tensor_dict"] for node in graph.graph.nodes if node.op == "placeholder"]
        result.append(all(argument.get("_dynamo_static_input_type") == "unguarded" for argument in arguments))
        return graph

    torch.compiler.reset()
    cache = torch.zeros(3)
    compiler.stay_in_place(cache)
    compiled = torch.compile(lambda x: x + 1, backend=look)
    compiled(torch.zeros(3))
    torch.compiler.reset()
    compiled(cache)
    assert result == [False, True]  # as an argument of that type, or since it is none (2.9)


def test_a_source_is_removed() -> None:
    function = type(fx.symbolic_trace(nn.ReLU())).forward
    file = function.__code__.co_filename
    assert file in _loader.eval_cache
    assert file in linecache.cache
    compiler.forget_source(function)
    assert file not in _loader.eval_cache
    assert file not in linecache.cache


# ---- sharding ----


def test_what_is_not_sharded_is_itself() -> None:
    tensor = torch.ones(2)
    assert sharding.local_part(tensor) is tensor


# ---- tensors ----


class Pair(NamedTuple):
    first: Tensor
    rest: list[Tensor]


def test_nested_values() -> None:
    nested = {"a": Pair(torch.ones(1), [torch.ones(2), torch.ones(3)]), "b": (torch.ones(4), None)}
    assert [leave.numel() for leave in tensors.tensors_in(nested)] == [1, 2, 3, 4]
    doubled = tensors.map_nested(lambda leave: None if leave is None else 2 * leave, nested)
    assert isinstance(doubled["a"], Pair)
    assert doubled["a"].rest[1].sum() == 6
    assert doubled["b"][1] is None


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_tensors_that_share_memory_have_one_key(device: str) -> None:
    first, other = torch.ones(2, 3, device=device), torch.ones(2, 3, device=device)
    keys = {tensors.storage_key(tensor) for tensor in (first, first.T, first[1], first.untyped_storage())}
    assert len(keys) == 1
    assert tensors.storage_key(other) not in keys


def test_a_change_in_place_counts() -> None:
    tensor = torch.ones(2)
    before = tensors.version_of(tensor)
    tensor[0].add_(1)  # a view of it
    assert tensors.version_of(tensor) == before + 1
    tensor + 1
    assert tensors.version_of(tensor) == before + 1


def test_a_hook_of_the_state_dict_is_found_in_a_copy_too() -> None:
    def hook(*_: Any) -> None: ...

    module = nn.Linear(2, 2)
    assert not tensors.has_state_dict_hook(module, hook)
    module.register_state_dict_post_hook(hook)
    assert tensors.has_state_dict_hook(module, hook)
    assert tensors.has_state_dict_hook(copy.deepcopy(module), hook)


def test_a_module_keeps_what_it_was_given_in_mappings_where_none_has_a_place() -> None:
    module = nn.Linear(2, 2, bias=False)
    module.register_buffer("seen", torch.ones(1), persistent=False)
    module.register_module("child", None)
    assert module._parameters == {"weight": module.weight, "bias": None}
    assert list(module._buffers) == ["seen"]
    assert module._non_persistent_buffers_set == {"seen"}
    assert OrderedDict(module._modules) == {"child": None}


# ---- torchscript ----


class Odd(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.no_such_method()  # type: ignore[operator, no-any-return]


def test_scripting_says_nothing_of_its_age() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with torchscript.no_deprecation_warnings():
            torch.jit.script(nn.Linear(2, 2))
            torch.jit.load  # noqa: B018
    assert caught == []


def test_a_program_runs_as_it_is_written() -> None:
    with torchscript.no_deprecation_warnings():
        program = torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.Tanh()))
    with torchscript.as_written():
        for _ in range(3):
            program(torch.ones(1, 2))
        assert "prim::CallMethod" in str(torch.jit.last_executed_optimized_graph())
    for _ in range(3):
        program(torch.ones(1, 2))
    assert "prim::CallMethod" not in str(torch.jit.last_executed_optimized_graph())


def test_what_failed_is_forgotten(tmp_path: Path) -> None:
    module = Odd()
    with torchscript.no_deprecation_warnings():
        for _ in range(2):
            with pytest.raises(RuntimeError, match="no_such_method"):
                torch.jit.script(module)
            torchscript.forget_classes()
        torch.jit.save(torch.jit.script(nn.Linear(2, 2)), tmp_path / "linear.ts")


# ---- hooks ----


def test_borrowed_hooks_run_until_the_context_ends() -> None:
    source, module = nn.Sequential(nn.Identity()), nn.Sequential(nn.Identity())
    calls: list[int] = []
    source[0].register_forward_hook(lambda *_: calls.append(1))
    source[0].register_forward_pre_hook(lambda *_, **__: calls.append(2), with_kwargs=True)
    with hooks.borrowed_hooks(module, source):
        module(torch.ones(1))
    module(torch.ones(1))
    assert calls == [2, 1]

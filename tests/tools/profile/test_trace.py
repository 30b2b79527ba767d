"""Handwritten traces, as from a GPU: every moment is attributed to the right component."""

from __future__ import annotations

from typing import Any

import pytest

from tfkit.tools.profile.attribution import Owner, device_times, host_times, located_work, memory_of, undisturbed_steps
from tfkit.tools.profile.torch_trace import ProfilerTrace, Stretch, parse_trace

MAIN, ENGINE = 1, 2
PATHS = {"a", "b"}
NODE = "autograd::engine::evaluate_function: "


def span(name: str, start: float, end: float, *, thread: int = MAIN, sequence: int | None = None) -> dict[str, Any]:
    """Something on the host; times in microseconds."""
    arguments = {} if sequence is None else {"Sequence number": sequence}
    return {"ph": "X", "cat": "cpu_op", "name": name, "tid": thread, "ts": start, "dur": end - start, "args": arguments}


def launch(time: float, number: int, *, thread: int = MAIN) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": "cuda_runtime",
        "name": "cudaLaunchKernel",
        "tid": thread,
        "ts": time,
        "dur": 1,
        "args": {"correlation": number},
    }


def kernel(name: str, start: float, end: float, number: int) -> dict[str, Any]:
    arguments = {"correlation": number, "stream": 7}
    return {"ph": "X", "cat": "kernel", "name": name, "tid": 7, "ts": start, "dur": end - start, "args": arguments}


def memory(time: float, size: int, address: int, device: int = 0) -> dict[str, Any]:
    arguments = {"Bytes": size, "Addr": address, "Device Type": device}
    return {"ph": "i", "cat": "cpu_instant_event", "name": "[memory]", "tid": MAIN, "ts": time, "args": arguments}


def on_device(trace: ProfilerTrace) -> Any:
    return device_times(trace, located_work(trace, PATHS))


def microseconds(times: dict[Owner, float]) -> dict[tuple[str | None, str], float]:
    return {(owner.path, owner.phase): round(seconds * 1e6, 3) for owner, seconds in times.items() if seconds}


def test_kernels_that_run_later_belong_to_whoever_launched_them() -> None:
    """The host is ahead: a is over before its kernel runs, and b's waits for that."""
    times = on_device(
        parse_trace(
            [
                span("[step]", 0, 200),
                span("a", 0, 10),
                launch(5, 1),
                span("b", 10, 20),
                launch(15, 2),
                kernel("of a", 10, 100, 1),
                kernel("of b", 102, 180, 2),
            ]
        )
    )
    assert microseconds(times.device) == {("a", "forward"): 90, ("b", "forward"): 78}
    assert microseconds(times.exclusive) == {
        ("a", "forward"): 100,
        ("b", "forward"): 80,
    }  # with the time before the kernels
    assert times.idle == pytest.approx(32e-6)
    assert times.kernels[("of b", Owner("b", "forward"))] == [pytest.approx(78e-6)]
    assert times.calls == {"a": 1, "b": 1}


def test_a_device_that_waits_for_the_host() -> None:
    """The kernels are short: the time belongs to what the host did until each was launched."""
    times = on_device(
        parse_trace(
            [
                span("[step]", 0, 200),
                span("a", 0, 100),
                launch(50, 1),
                kernel("of a", 55, 60, 1),
                span("b", 100, 200),
                launch(150, 2),
                kernel("of b", 155, 160, 2),
            ]
        )
    )
    assert microseconds(times.exclusive) == {("a", "forward"): 100, ("b", "forward"): 100}
    assert microseconds(times.device) == {("a", "forward"): 5, ("b", "forward"): 5}


def test_the_backward_runs_in_another_thread() -> None:
    actual = on_device(
        parse_trace(
            [
                span("[step]", 0, 100),
                span("a", 0, 10),
                span("aten::mm", 2, 8, sequence=4),
                launch(5, 1),
                kernel("forward", 6, 20, 1),
                span("b", 10, 20),
                span("aten::relu", 12, 18, sequence=5),
                span("[backward]", 30, 95),
                span(f"{NODE}ReluBackward0", 30, 40, thread=ENGINE, sequence=5),
                launch(35, 2, thread=ENGINE),
                kernel("of relu", 36, 60, 2),
                span("b", 37, 39, thread=ENGINE),  # computed again; each thread has numbers of its own
                span("aten::relu", 38, 39, thread=ENGINE, sequence=4),
                span(f"{NODE}MmBackward0", 40, 50, thread=ENGINE, sequence=4),
                launch(45, 3, thread=ENGINE),
                kernel("of mm", 60, 90, 3),
                span(f"{NODE}torch::autograd::AccumulateGrad", 50, 60, thread=ENGINE),
                launch(55, 4, thread=ENGINE),
                kernel("of the sum", 90, 95, 4),
            ]
        )
    )
    assert microseconds(actual.device) == {("a", "forward"): 14, ("b", "backward"): 24, ("a", "backward"): 35}


def test_kernels_side_by_side_count_once() -> None:
    times = on_device(
        parse_trace(
            [
                span("[step]", 0, 100),
                span("a", 0, 10),
                launch(1, 1),
                launch(2, 2),
                kernel("one", 10, 60, 1),
                kernel("two", 20, 100, 2),
            ]
        )
    )
    assert microseconds(times.device) == {("a", "forward"): 90}
    assert sum(times.exclusive.values()) == pytest.approx(100e-6)


def test_the_last_operator_with_a_number_has_made_the_node() -> None:
    """An operator that makes no node sees the number that the next one takes."""
    trace = parse_trace(
        [
            span("[step]", 0, 100),
            span("a", 0, 10),
            span("aten::empty", 1, 2, sequence=7),
            span("b", 10, 20),
            span("aten::mm", 11, 19, sequence=7),
            span("[backward]", 20, 100),
            span(f"{NODE}MmBackward0", 30, 60, sequence=7),
            span("a", 40, 50),  # computed again for it
            span("aten::mm", 41, 49, sequence=7),
        ]
    )
    times = host_times(located_work(trace, PATHS))
    assert microseconds(times.exclusive) == {
        (None, "backward"): 50,
        ("a", "forward"): 10,
        ("b", "forward"): 10,
        ("b", "backward"): 20,
        ("a", "backward"): 10,
    }


def test_between_two_nodes_the_first_one_gives_memory_back() -> None:
    trace = parse_trace(
        [
            span("[step]", 0, 100),
            span("a", 0, 10),
            span("aten::mm", 1, 9, sequence=1),
            span("b", 10, 20),
            span("aten::mm", 11, 19, sequence=2),
            span("[backward]", 20, 100),
            span("aten::ones_like", 22, 25),
            span(f"{NODE}MmBackward0", 30, 50, sequence=2),
            span(f"{NODE}MmBackward0", 60, 90, sequence=1),
        ]
    )
    exclusive = microseconds(host_times(located_work(trace, PATHS)).exclusive)
    assert exclusive[("b", "backward")] == 30
    assert exclusive[("a", "backward")] == 30
    assert exclusive[("[loss]", "backward")] == 8
    assert exclusive[(None, "backward")] == 12


def test_what_runs_outside_of_the_steps_does_not_count() -> None:
    trace = parse_trace([span("a", 0, 10), span("[step]", 20, 30), span("a", 22, 28), span("a", 40, 50)])
    assert microseconds(host_times(located_work(trace, PATHS)).exclusive)[("a", "forward")] == 6


def test_memory_of_the_device_and_of_the_host_are_apart() -> None:
    trace = parse_trace(
        [
            span("[step]", 0, 100),
            span("a", 0, 50),
            memory(10, 100, 1, device=1),
            memory(11, 30, 2, device=1),
            memory(12, -30, 2, device=1),
            memory(13, 5000, 3, device=0),
            span("b", 50, 100),
            memory(60, 40, 4, device=1),
            memory(70, -100, 1, device=1),
        ]
    )
    actual = memory_of(located_work(trace, PATHS), 0, 1000, on_device=True)
    assert (actual.peak, actual.owner.path) == (1140, "b")
    assert +actual.allocated == {"a": 130, "b": 40}
    assert +actual.at_peak == {"a": 100, "b": 40}
    assert actual.highest["a"] == 1130


def test_a_step_that_something_held_up_does_not_count() -> None:
    assert undisturbed_steps([Stretch(0, 10), Stretch(10, 21), Stretch(21, 90), Stretch(90, 99)]) == [0, 3]
    assert undisturbed_steps([Stretch(0, 10), Stretch(10, 20)]) == [0, 1]


def test_operators_and_annotations_are_rows_of_the_host() -> None:
    rows = [
        {"cat": kind, "name": kind, "ts": start, "dur": 2, "tid": 1, "args": {"correlation": start}}
        for start, kind in enumerate(("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver", "python_function"))
    ]
    copies = [{**rows[0], "cat": kind, "name": kind} for kind in ("kernel", "gpu_memcpy", "gpu_memset")]
    parsed = parse_trace([*rows, *copies])
    assert [type(row).__name__ for row in parsed.host] == ["HostSpan", "HostSpan", "Launch", "Launch"]
    assert len(parsed.kernels) == 3

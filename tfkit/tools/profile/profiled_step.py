"""A step to profile (an update, a prompt, or one more token), and named ranges around the components of its model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.profiler import record_function

from tfkit.building.builder import graph_of
from tfkit.decoding.cached import CachedModel
from tfkit.graph.decode_split import DecodeSplit, split_for_decoding, split_if_decodable
from tfkit.learning.adamw import adamw
from tfkit.learning.loss import Loss
from tfkit.tools.common.memory_needs import size_of
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.common.modes import Mode
from tfkit.tools.common.ownership import Ownership, owners_of
from tfkit.tools.cost.watch_step import frames_of
from tfkit.tools.profile.limits import synchronize_device
from tfkit.tools.profile.result import STEP_ROWS, MemoryUse
from tfkit.torch_private.dispatch import QuickRange

Range: TypeAlias = Callable[[str], Any]
"""name -> a context manager that appears in the trace."""
quick_range: Range = QuickRange
"""A range that takes a tenth of the time of `annotated_range`, about 0.6 us; in a trace, it appears as an operator."""
annotated_range: Range = record_function
"""A range that trace viewers recognize as an annotation."""

STEP, BACKWARD = "[step]", "[backward]"
STEP_RANGES = {f"[{name}]": Ownership(name, name, f"[{name}]", name, name) for name in STEP_ROWS}
"""Ranges with separate rows. Paths of a model contain no brackets."""


def named_parts(model: fx.GraphModule) -> dict[str, Ownership]:
    """Return the modules that get a range, by path: nodes, layers and components, including the modules inside."""
    parts = owners_of(model)
    return {path: parts[path] for path in frames_of(model)}


@contextmanager
def named_ranges(model: fx.GraphModule, range: Range) -> Iterator[None]:
    """Put a range around each of the `named_parts`; on exit the model is restored."""
    running: list[Any] = []

    def enter(path: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any) -> None:
            opened = range(path)
            opened.__enter__()
            running.append(opened)

        return hook

    def leave(module: nn.Module, args: Any, output: Any) -> None:
        running.pop().__exit__(None, None, None)

    with ExitStack() as hooks:
        for path in named_parts(model):
            module = model.get_submodule(path)
            hooks.enter_context(module.register_forward_pre_hook(enter(path), prepend=True))
            # A recomputed layer is left by an exception as soon as everything exists that the backward needs.
            hooks.enter_context(module.register_forward_hook(leave, always_call=True))
        yield


Inputs: TypeAlias = dict[str, Tensor]
TokensWithInputs: TypeAlias = tuple[Tensor, dict[str, Any]]
"""Tokens, and the inputs that belong to them."""
LEARNING_RATE = 1e-6
"""Small, so that random targets do no harm; the work does not depend on the rate."""


@dataclass(frozen=True)
class Settings:
    """The settings for one model; see `profile_models`."""

    device: torch.device
    mode: Mode
    dtype: torch.dtype
    compile: bool
    batch: int
    length: int
    steps: int
    warmup: int
    weights: Path | None
    allow_change: bool


class ProfiledStep:
    """One step of a model that can be repeated, always with the same work.

    Args:
        model: the model, in train mode for `train`, in eval mode otherwise.
        mode: `train` is zero_grad, forward, loss, backward, AdamW. `prefill` reads all tokens of new sequences into
            empty caches, and computes logits of the last; a model without caches, such as an encoder, just runs.
            `decode` reads one token with all earlier ones in the cache.
        compile: compile the full code of the step.

    Raises:
        SpecError: the model cannot be decoded token by token.
    """

    def __init__(self, model: fx.GraphModule, mode: Mode, *, batch: int, length: int, compile: bool) -> None:
        self._model, self._inputs = model, _model_inputs(model, batch, length)
        self._device = next(iter(self._inputs.values())).device
        self._optimizer: torch.optim.Optimizer | None = None
        self._cached: CachedModel | None = None
        if mode == "train":
            self._run = self._training(compile)
        elif mode == "decode" or split_if_decodable(graph_of(model)) is not None:
            self._run = self._reading(mode, compile)
        else:
            self._run = self._running(compile)

    def __call__(self, range: Range) -> None:
        """Run the step, with ranges for the work outside the model."""
        with range(STEP):
            self._run(range)
            synchronize_device(self._device)

    def held(self) -> MemoryUse:
        """Return the bytes in use on the device between two steps, which are a lower bound of the peak."""
        states = self._optimizer.state.values() if self._optimizer is not None else ()
        weights = size_of(self._model)
        optimizer = _total_bytes(value for state in states for value in state.values())
        gradients = _total_bytes(parameter.grad for parameter in self._model.parameters())
        cache = self._cached.nbytes if self._cached is not None else 0
        total = weights + optimizer + gradients + cache + _total_bytes(self._inputs.values())
        if self._device.type == "cuda":
            total = torch.cuda.memory_allocated(self._device)
        return MemoryUse(total, total, weights, optimizer, gradients, cache)

    def _training(self, compile: bool) -> Callable[[Range], None]:
        loss, optimizer = _loss_function(self._model, self._inputs), adamw(self._model, LEARNING_RATE)
        run: Callable[[Inputs], Tensor] = torch.compile(loss) if compile else loss
        name = "[compiled]" if compile else "[loss]"
        self._optimizer = optimizer

        def step(range: Range) -> None:
            with range("[zero_grad]"):
                optimizer.zero_grad()
            with range(name):
                value = run(self._inputs)
            with range(BACKWARD):
                value.backward()
            with range("[optimizer]"):
                optimizer.step()

        return step

    def _reading(self, mode: Mode, compile: bool) -> Callable[[Range], None]:
        parts = split_for_decoding(graph_of(self._model))
        length = self._inputs[parts.step_inputs[0]].size(1)
        cached = CachedModel(self._model, length=length, compile=compile and mode == "decode")
        if compile and mode == "prefill":
            cached.stepping = torch.compile(cached.stepping)  # type: ignore[assignment]
        self._cached, name = cached, "[compiled]" if compile else "[model]"
        once, prompt, token = _decoding_inputs(self._inputs, parts, length if mode == "prefill" else length - 1)

        def prefill(range: Range) -> None:
            with range("[model]"):
                cached.start(prompt[0].size(0), **once)
            with range(name):
                cached(prompt[0], keep=1, **prompt[1])

        def decode(range: Range) -> None:
            with range(name):
                begun = copy.copy(cached)  # the same caches, with a separate count of their contents
                begun(token[0], keep=1, **token[1])

        if mode == "prefill":
            return prefill
        cached.start(token[0].size(0), **once)
        if length > 1:
            cached(prompt[0], keep=1, **prompt[1])
        return decode

    def _running(self, compile: bool) -> Callable[[Range], None]:
        run: Any = torch.compile(self._model) if compile else self._model

        def step(range: Range) -> None:
            with torch.no_grad(), range("[compiled]" if compile else "[model]"):
                run(**self._inputs)

        return step


def _model_inputs(model: fx.GraphModule, batch: int, length: int) -> Inputs:
    parameter = next(model.parameters(), torch.empty(0))
    return random_inputs(graph_of(model), batch=batch, length=length, device=parameter.device, dtype=parameter.dtype)


def _decoding_inputs(
    inputs: Inputs, parts: DecodeSplit, length: int
) -> tuple[Inputs, TokensWithInputs, TokensWithInputs]:
    """Split inputs into those read once, the first `length` tokens, and the next token."""
    once = {name: inputs[name] for name in parts.initial_inputs}
    once = {name: value.clamp(max=max(length, 1)) if value.dim() == 1 else value for name, value in once.items()}
    main, *rest = parts.step_inputs
    prompt: TokensWithInputs = inputs[main][:, :length], {name: inputs[name][:, :length] for name in rest}
    token: TokensWithInputs = inputs[main][:, -1:], {name: inputs[name][:, -1:] for name in rest}
    return once, prompt, token


def _loss_function(model: fx.GraphModule, inputs: Inputs) -> Callable[[Inputs], Tensor]:
    """Return a loss: cross-entropy for logits, with the next or a random token as target; else mean squares."""
    try:
        loss = Loss(model, outputs=dict.fromkeys(graph_of(model).outputs, 1.0))
    except ValueError:
        return lambda values: _sum_of_mean_squares(model(**values))
    with torch.no_grad():
        reads = loss.read(inputs)
    device, targets = next(iter(inputs.values())).device, {}
    for name, ends in loss.ends.items():
        if ends.tokens is None:
            generator, shape = torch.Generator().manual_seed(0), reads[name].hidden.shape[:-1]
            targets[name] = torch.randint(ends.vocab_size, shape, generator=generator, device="cpu").to(device)
    return lambda values: loss(values, targets)


def _sum_of_mean_squares(outputs: Any) -> Tensor:
    tensors = [
        tensor for tensor in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(tensor, Tensor)
    ]
    return torch.stack([tensor.float().square().mean() for tensor in tensors]).sum()


def _total_bytes(values: Iterable[Any]) -> int:
    return sum(value.nbytes for value in values if isinstance(value, Tensor))

"""The layers of a run: the memory that each keeps for the backward, and needs while it runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from tfkit.tools.cost.live_memory import nbytes
from tfkit.tools.cost.observe import Place, Watch
from tfkit.torch_private.tensors import tensors_in


@dataclass(eq=False)
class Run:
    """A call of a layer.

    Attributes:
        keeps: bytes that its forward leaves for the backward, besides its inputs and outputs.
        frees: bytes that are freed if it keeps its inputs, and nothing else.
        forward: the rise of memory above its level when the forward began.
        backward: that of the backward.
    """

    keeps: int = 0
    frees: int = 0
    forward: int = 0
    backward: int = 0


class Moment(NamedTuple):
    """A stretch of time: its peak, or, for a layer, the level of memory at its beginning."""

    level: int
    held: int
    """The share of it that layers keep at that time beside their inputs."""
    run: Run | None = None
    backward: bool = False

    def peak(self, *, recompute: bool) -> int:
        """The most memory in use at once, also if layers kept only their inputs, and ran again in the backward."""
        level = self.level - self.held * recompute
        if self.run is None:
            return level
        if not self.backward:
            return level + self.run.forward
        again = max(self.run.forward, self.run.keeps + self.run.backward)
        return level + (again if recompute else self.run.backward)


class Layers:
    """Watches the calls of layers.

    Attributes:
        runs: the calls in their order.
        moments: the memory over time.
    """

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self.runs: list[Run] = []
        self.moments: list[Moment] = []
        self._held = 0
        self._open: tuple[Run, int] | None = None

    def take_over(self, path: str, layer: nn.Module) -> None:
        """Route the calls of this layer through here from now on."""
        forward = layer.forward
        layer.forward = lambda *args: self._call(path, forward, args)

    def finish(self) -> None:
        """Close the last stretch of time."""
        self._close()
        self._split()

    def peak(self, *, recompute: bool) -> int:
        """The most memory at once."""
        return max(moment.peak(recompute=recompute) for moment in self.moments)

    def _call(self, path: str, forward: Callable[..., Tensor], args: Any) -> Tensor:
        """Run a layer, and record its observations."""
        watch, live, run = self.watch, self.watch.live, Run()
        x = next(tensors_in(args))
        self._split()
        self.runs.append(run)
        level = live.level
        watch.enter(Place(len(self.runs), path))
        out = forward(*args)
        watch.leave()
        run.keeps, run.forward = live.level - level - nbytes(out), live.peak - level
        self.moments.append(Moment(level, self._held, run))
        live.peak = live.level
        run.frees = run.keeps - (0 if live.number(x) in watch.kept else nbytes(x))
        if out.requires_grad:
            self._held += run.frees
            out.register_hook(lambda grad: self._begin(run))
            if x.requires_grad:
                x.register_hook(lambda grad: self._close(run))
        return out

    def _begin(self, run: Run) -> None:
        """Begin the backward of a layer."""
        self._close()
        self._split()
        self._open = run, self.watch.live.level

    def _close(self, run: Run | None = None) -> None:
        """End the backward of a layer: that of `run`, or of any."""
        if self._open is None or (run is not None and self._open[0] is not run):
            return
        (open_run, level), live = self._open, self.watch.live
        open_run.backward = live.peak - level
        self.moments.append(Moment(level, self._held, open_run, backward=True))
        self._held -= open_run.frees
        self._open, live.peak = None, live.level

    def _split(self) -> None:
        """Close a stretch of time."""
        self.moments.append(Moment(self.watch.live.peak, self._held))
        self.watch.live.peak = self.watch.live.level

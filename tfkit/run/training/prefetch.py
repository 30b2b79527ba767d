"""The batch of the next step, which a second thread prepares during a step."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait

from tfkit.run.contract import Batch


class Prefetch:
    """Batches of steps in order.

    Args:
        batch: returns the batch of a step, which must depend only on the step.
        last: the last step.
    """

    def __init__(self, batch: Callable[[int], Batch], last: int) -> None:
        self._batch, self._last = batch, last
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="batches")
        self._next: tuple[int, Future[Batch]] | None = None

    def take(self, step: int) -> Batch:
        """Return the batch of a step, and begin to prepare the next one. An error is raised at its step."""
        batch = self._next[1].result() if self._next and self._next[0] == step else self._batch(step)
        self._next = (step + 1, self._pool.submit(self._batch, step + 1)) if step < self._last else None
        return batch

    def wait(self) -> None:
        """Wait until the next batch is complete, so the data is free for other readers."""
        if self._next is not None:
            wait([self._next[1]])

    def close(self) -> None:
        """End the thread."""
        self._pool.shutdown(cancel_futures=True)

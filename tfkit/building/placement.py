"""Devices and dtypes by name, the number of threads, and the global random generators."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import torch

from tfkit.arguments import DTYPES, value_text
from tfkit.errors import closest_name, quoted

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
GLOBAL_GENERATORS = threading.RLock()
"""Lock for torch's global random generators, which all threads of a process share. tfkit holds the lock from seeding a
generator until the last number is drawn, so threads of tfkit do not disturb each other."""
AnyDtype: TypeAlias = Annotated[torch.dtype | str, "a type of numbers such as torch.bfloat16 or 'bfloat16'"]
AnyDevice: TypeAlias = Annotated[torch.device | str, "a device such as 'cpu', 'cuda:1' or 'meta'"]


def dtype_of(dtype: AnyDtype) -> torch.dtype:
    """Return a dtype by name; raise ValueError for a dtype that weights cannot have."""
    resolved = TYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if resolved is None:
        near = closest_name(str(dtype), DTYPES)
        help = f": a similar one is '{near}'" if near else ""
        raise ValueError(f"the type of weights must be one of {', '.join(DTYPES)}; got {value_text(dtype)}{help}")
    if resolved not in TYPES.values():
        raise ValueError(f"the type of weights must be one of {', '.join(DTYPES)}; got {resolved}")
    return resolved


def device_of(device: AnyDevice) -> torch.device:
    """Return a device by name; raise ValueError if it is not available."""
    try:
        resolved = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{quoted(str(device))} is not a device: cpu, cuda, cuda:1, mps, meta") from None
    if resolved.type not in ("cpu", "meta"):
        try:
            torch.empty(1, device=resolved)
        except (RuntimeError, AssertionError, NotImplementedError) as error:
            reason = str(error).partition("\n")[0].partition(". ")[0]
            raise ValueError(f"`{resolved}` cannot be used here: {reason}") from None
    return resolved


@contextmanager
def thread_count(number: int) -> Iterator[None]:
    """Set the number of threads of torch's operations inside the context."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def forked_generator() -> Iterator[None]:
    """Lock the global random generators, and restore the state of the CPU's generator on exit."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        yield

"""The device and type of tensors, by the names that users give; threads, and the random generators that they share."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, TypeAlias

import torch

from tfkit.arguments import DTYPES, shown
from tfkit.errors import closest, quoted

TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES}
GLOBAL_GENERATORS = threading.RLock()
"""Lock of torch's global random generators, which all threads of a process share. tfkit holds it from the seed to the
last number that a module draws: no other thread of tfkit seeds a generator, draws or restores a state in between."""
AnyDtype: TypeAlias = Annotated[torch.dtype | str, "a type of numbers such as torch.bfloat16 or 'bfloat16'"]
AnyDevice: TypeAlias = Annotated[torch.device | str, "a device such as 'cpu', 'cuda:1' or 'meta'"]


def dtype_of(dtype: AnyDtype) -> torch.dtype:
    """Return the dtype with a name; raise ValueError if weights cannot have it."""
    resolved = TYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if resolved is None:
        near = closest(str(dtype), DTYPES)
        help = f": a similar one is '{near}'" if near else ""
        raise ValueError(f"the type of weights must be one of {', '.join(DTYPES)}; got {shown(dtype)}{help}")
    if resolved not in TYPES.values():
        raise ValueError(f"the type of weights must be one of {', '.join(DTYPES)}; got {resolved}")
    return resolved


def device_of(device: AnyDevice) -> torch.device:
    """Return the device with a name; raise ValueError if it is not available."""
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
def threads(number: int) -> Iterator[None]:
    """Use `number` threads inside torch's operations."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def forked_generator() -> Iterator[None]:
    """Lock the global random generators; afterwards, restore the state of the CPU's generator."""
    with GLOBAL_GENERATORS, torch.random.fork_rng(devices=[]):
        yield

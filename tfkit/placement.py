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
    """The type of that name; raises ValueError if weights cannot be of it."""
    found = TYPES.get(dtype.removeprefix("torch.")) if isinstance(dtype, str) else dtype
    if found is None:
        near = closest(str(dtype), DTYPES)
        help = f": a similar one is '{near}'" if near else ""
        raise ValueError(f"a type of weights is one of {', '.join(DTYPES)}, not {shown(dtype)}{help}")
    if found not in TYPES.values():
        raise ValueError(f"a type of weights is one of {', '.join(DTYPES)}, not {found}")
    return found


def name_of(dtype: torch.dtype) -> str:
    """The name of a type, as `dtype_of` reads it: `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def device_of(device: AnyDevice) -> torch.device:
    """The device of that name; raises ValueError if it is not available."""
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(f"{quoted(str(device))} is not a device: cpu, cuda, cuda:1, mps, meta") from None
    if found.type not in ("cpu", "meta"):
        try:
            torch.empty(1, device=found)
        except (RuntimeError, AssertionError, NotImplementedError) as wrong:
            reason = str(wrong).partition("\n")[0].partition(". ")[0]
            raise ValueError(f"`{found}` cannot be used here: {reason}") from None
    return found


@contextmanager
def threads(number: int) -> Iterator[None]:
    """That many threads inside torch's operations."""
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

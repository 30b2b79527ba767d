"""Reads pickles of tensors and writes them as safetensors. Runs without tfkit, in a separate process.

It reads lines of JSON from standard input: first the folders of Python's import path, then pairs of a pickle and a file
to write. It writes a line for each pair: the settings of the model that the pickle contains, or an error.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

NEW_USER, NEW_NETWORK = 0x10000000, 0x40000000
"""Flags of Linux for a separate namespace of users, which needs no privileges, and of network devices."""
SLACK = 2**24
"""Bytes that a file of safetensors may have in addition to its tensors: names and shapes."""
COMPILED = "_orig_mod."
"""The prefix of the names of a compiled model."""


def isolate() -> None:
    """Remove the network, if the system allows it. This must precede the first thread."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).unshare(NEW_USER | NEW_NETWORK)


def limit_files(size: int) -> None:
    """Limit the size of each file that this process writes."""
    with suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def write_tensors(source: str, target: str) -> dict[str, Any]:
    """Write the tensors of a pickle, and return the settings of the model in it: the `model_args` of nanoGPT.

    Raise ValueError if it contains other objects than tensors and plain values, or is damaged.
    """
    import torch
    from safetensors.torch import save_file

    content = load(source)
    state = content.get("model", content) if isinstance(content, dict) else None
    if not isinstance(state, dict):
        raise ValueError("it has no mapping from names to tensors")
    tensors = {
        key.removeprefix(COMPILED): tensor.detach()
        for key, tensor in state.items()
        if isinstance(key, str) and isinstance(tensor, torch.Tensor)
    }
    if not tensors:
        raise ValueError("it has no tensors")
    if odd := [
        name for name, tensor in tensors.items() if tensor.layout != torch.strided or tensor.device.type == "meta"
    ]:
        raise ValueError(f"tensor `{odd[0]}` must be stored with all its values")
    # A tensor can repeat its bytes, and a name can repeat a tensor: a small file could fill the disk.
    if (total := sum(tensor.nbytes for tensor in tensors.values())) > 2 * os.path.getsize(source) + SLACK:
        raise ValueError(f"its tensors have {total:,} bytes, more than twice the size of the file")
    save_file(separated(tensors), target)
    settings = content.get("model_args")
    return settings if isinstance(settings, dict) else {}


def load(source: str) -> Any:
    """Load a pickle whose only objects are tensors and plain values; raise ValueError for any other file."""
    import zipfile

    import torch

    try:
        # Files of torch before 1.6 are not archives, and cannot be mapped into memory.
        return torch.load(source, "cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except Exception as error:  # a damaged file can raise any error
        text = str(error)
        names = re.findall(r"GLOBAL (\S+)", text)
        if names:
            raise ValueError(f"it names `{names[0]}`, which is neither a tensor nor a plain value") from error
        text = text.rpartition("WeightsUnpickler error:")[2].partition("Check the documentation")[0]  # of torch.load
        line = re.sub(r"\s+", " ", text).strip()[:200]
        raise ValueError(f"it is damaged or truncated: {line or type(error).__name__}") from error


def separated(tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tensors, with a copy of each tensor that shares memory, because safetensors rejects these."""
    addresses: set[int] = set()
    separate = {}
    for name, tensor in tensors.items():
        storage = tensor.untyped_storage()
        is_alone = storage.nbytes() == tensor.nbytes and storage.data_ptr() not in addresses
        addresses.add(storage.data_ptr())
        separate[name] = tensor.contiguous() if is_alone else tensor.contiguous().clone()
    return separate


def answer(source: str, target: str) -> dict[str, Any]:
    """Write the tensors of a pickle, and return its settings or an error."""
    try:
        return {"settings": write_tensors(source, target)}
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        return {"error": str(error) or type(error).__name__}


def main() -> None:
    """Answer the requests on standard input."""
    isolate()
    sys.path[:0] = json.loads(sys.stdin.readline())
    for line in sys.stdin:
        source, target = json.loads(line)
        limit_files(2 * os.path.getsize(source) + 2 * SLACK)
        print(json.dumps(answer(source, target), default=str), flush=True)


if __name__ == "__main__":
    main()

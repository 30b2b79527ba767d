"""Runs of `tfkit train` by several processes, as a user starts them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

from tfkit.cli import main

TIMEOUT = 150
"""Seconds until a launch is ended as one that hangs."""


def options(*sets: str) -> list[str]:
    """The options of a command that change values."""
    return [word for change in sets for word in ("--set", change)]


def start(folder: Path, processes: int, *arguments: str, script: str | None = None) -> subprocess.Popen[str]:
    """`torchrun -m tfkit train` on a port of its own, each process with one thread; or a script instead of tfkit."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, *launcher, *([script] if script else ["-m", "tfkit"]), "train", "--no-plugins", *arguments],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(started: subprocess.Popen[str]) -> tuple[int, str, str]:
    """The status, the output and the errors of a launch; ends one that hangs, with all of its processes."""
    try:
        out, errors = started.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        os.killpg(started.pid, signal.SIGKILL)
        raise
    return started.returncode, out, errors


def launched(folder: Path, processes: int, *arguments: str) -> str:
    """The output of a launch that must succeed."""
    status, out, errors = finish(start(folder, processes, *arguments))
    assert status == 0, errors
    assert "Warning" not in errors
    return out


def forked(folder: Path, processes: int, *arguments: str) -> None:
    """The same in forks of one process, which imports torch once; not of this one, whose threads they would lack."""
    status, _, errors = finish(start_forks(folder, processes, *arguments))
    assert status == 0, errors


def start_forks(folder: Path, processes: int, *arguments: str) -> subprocess.Popen[str]:
    """Start forks of one process, which ends with them."""
    return subprocess.Popen(
        [sys.executable, str(Path(__file__)), str(processes), "train", "--no-plugins", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def fork(processes: int, action: Callable[[], int]) -> int:
    """Run an action in processes that know of each other; returns how many of them failed."""
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": str(processes)}
    # The store, by which the processes agree on who prints, outlives each of them, as the store of torchrun does.
    address |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RESTART_COUNT": "0"}
    children = []
    for rank in range(processes):
        child = os.fork()
        if child == 0:
            try:
                signal.alarm(TIMEOUT)
                os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank))
                os._exit(action())
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(1)
        children.append(child)
    store = TCPStore("localhost", port, is_master=True, wait_for_workers=False)  # its thread: only after the forks
    failed = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    del store
    return failed


def numbers(folder: Path) -> list[dict[str, Any]]:
    """The lines of `metrics.jsonl`."""
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def tensors(folder: Path, name: str = "model") -> dict[str, Tensor]:
    """The tensors of the latest checkpoint."""
    return load_file(folder / (folder / "latest").read_text().strip() / f"{name}.safetensors")


def latest(folder: Path) -> int:
    """The step that a run would continue after; -1 before its first checkpoint."""
    file = folder / "latest"
    return int(file.read_text().strip()[5:]) if file.exists() else -1


def children(started: subprocess.Popen[str]) -> list[int]:
    """The processes of a launch, by rank."""
    pids = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    ranks = {}
    for pid in pids.split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((variable for variable in environment if variable.startswith(b"RANK=")), None)
        if rank is not None:
            ranks[int(rank[5:])] = int(pid)
    return [number for _, number in sorted(ranks.items())]


if __name__ == "__main__":
    # Everything that every fork needs is imported once.
    import tfkit.decoding.generate
    import tfkit.run.training.parallel
    import tfkit.tools.cost.cost
    import tfkit.tools.train.command
    import tfkit.tools.train.progress
    import tfkit.tools.train.train

    tfkit.load_plugins(entry_points=False)

    sys.exit(fork(int(sys.argv[1]), lambda: main(sys.argv[2:])))

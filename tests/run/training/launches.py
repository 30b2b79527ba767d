"""Runs of `tfkit train` by several processes, as a user starts them."""

from __future__ import annotations

import atexit
import contextlib
import gc
import json
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from select import select
from socket import AF_UNIX, SOCK_SEQPACKET, create_server, recv_fds, send_fds, socket, socketpair
from tempfile import TemporaryFile, gettempdir
from typing import Any, NoReturn

from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import TCPStore

import tfkit
from tfkit.run.reach import digests_of_class
from tfkit.run.training.loop import Trainer

TFKIT = "import sys; from tfkit.cli import main; sys.exit(main(sys.argv[1:]))"
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


def finish(started: subprocess.Popen[str] | Launch) -> tuple[int, str, str]:
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


def forked(folder: Path, processes: int, *arguments: str, program: str = TFKIT) -> None:
    """The same in forks of the template."""
    status, _, errors = finish(start_forks(folder, processes, *arguments, program=program))
    assert status == 0, errors


def start_forks(folder: Path, processes: int, *arguments: str, program: str = TFKIT) -> Launch:
    """Start forks of the template, a process that has imported torch; not of this one, whose threads they would lack.

    They execute the text of a program.
    """
    return Launch([str(folder.absolute()), processes, program, ["train", "--no-plugins", *arguments]])


class Launch:
    """Forks of the template, and their parent, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, request: Sequence[Any]) -> None:
        self._files = TemporaryFile("w+"), TemporaryFile("w+")  # noqa: SIM115  closed after they have been read
        self._answers, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
        with theirs:
            descriptors = [*(file.fileno() for file in self._files), theirs.fileno()]
            send_fds(template()[0], [json.dumps(request).encode()], descriptors)
        self.returncode: int | None = None
        self.pid = int(self._answers.recv(20))

    def poll(self) -> int | None:
        """Return the status; None while a process runs."""
        if self.returncode is None and select([self._answers], [], [], 0)[0]:
            self.returncode = int(self._answers.recv(20) or -signal.SIGKILL)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Wait for the end, and return the output and the errors."""
        select([self._answers], [], [], timeout)
        if self.poll() is None:
            raise subprocess.TimeoutExpired("tfkit train", timeout or 0)
        self._answers.close()
        texts = []
        for file in self._files:
            with file:
                file.seek(0)
                texts.append(file.read())
        return texts[0], texts[1]


@cache
def template() -> tuple[socket, subprocess.Popen[bytes]]:
    """Start the template, which ends with this process, and return the socket that takes its requests."""
    requests, theirs = socketpair(AF_UNIX, SOCK_SEQPACKET)
    with theirs:
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        process = subprocess.Popen(
            [sys.executable, __file__], cwd=gettempdir(), env=environment, stdin=theirs, start_new_session=True
        )
    atexit.register(lambda: (requests.close(), process.wait()))
    return requests, process


def serve(requests: socket) -> None:
    """Fork a launch for each request, until nobody is left to send one."""
    while True:
        request, descriptors, _, _ = recv_fds(requests, 1 << 16, 3)
        if not request:
            return
        if os.fork() == 0:
            run_request(*json.loads(request), *descriptors)
        for number in descriptors:
            os.close(number)
        with contextlib.suppress(ChildProcessError):  # when all have been waited for
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def run_request(
    folder: str, processes: int, program: str, arguments: list[str], output: int, errors: int, answers: int
) -> NoReturn:
    """Launch processes with these files as their output, and answer with the number of this one, then its status."""
    failed = 1
    try:
        os.setsid()
        os.chdir(folder)
        for number, file in enumerate((os.open(os.devnull, os.O_RDONLY), output, errors)):
            os.dup2(file, number)
        os.write(answers, b"%d" % os.getpid())
        sys.argv = ["tfkit", *arguments]
        failed = fork(processes, lambda: run_program(program))
    except BaseException:
        traceback.print_exc()
    finally:
        os.write(answers, b"%d" % min(failed, 1))
        os._exit(failed)


def run_program(program: str) -> int:
    """Execute the text of a program, and return its status."""
    try:
        exec(program, {"__name__": "__main__"})
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def fork(processes: int, action: Callable[[], int]) -> int:
    """Run an action in processes that know of each other; returns how many of them failed."""
    with create_server(("localhost", 0)) as free:
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


def children(started: subprocess.Popen[str] | Launch) -> list[int]:
    """The processes of a launch, by rank."""
    pids = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text()
    ranks = {}
    for pid in pids.split():
        environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        rank = next((variable for variable in environment if variable.startswith(b"RANK=")), None)
        if rank is not None:
            ranks[int(rank[5:])] = int(pid)
    return [number for _, number in sorted(ranks.items())]


PRELOADED = (
    "numpy.ma",
    "packaging.requirements",
    "rich.progress",
    "torch._dynamo",
    "tfkit.cli",
    "tfkit.decoding.generate",
    "tfkit.run.training.parallel",
    "tfkit.tools.common.plugin_checks",
    "tfkit.tools.cost.cost",
    "tfkit.tools.train.command",
    "tfkit.tools.train.plan",
    "tfkit.tools.train.progress",
    "tfkit.tools.train.train",
)
"""Modules that launches import."""


if __name__ == "__main__":
    for module in PRELOADED:
        import_module(module)
    # The digests of code take as long as the imports of tfkit, and do not change.
    kinds = tfkit.load_plugins(entry_points=False).registry
    for cls in (Trainer, *(entry.config for slot in kinds.slots() for entry in kinds.kinds(slot).values())):
        digests_of_class(cls)
    assert len(os.listdir("/proc/self/task")) == 1, "forks would lack the threads"
    gc.collect()
    gc.freeze()
    serve(socket(fileno=0))

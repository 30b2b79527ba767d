"""`tfkit generate` in a separate process: it streams, and ends cleanly when it is interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import tfkit

from .conftest import LIMIT, PROMPT, Run

pytestmark = pytest.mark.filterwarnings("ignore::tfkit.FirstLossWarning")  # sure of its tokens on purpose


SLOW = """
import signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
import tfkit.decoding.sampling as sampling
choose = sampling.Sampler.__call__
def slowly(self, logits):
    time.sleep(0.1)
    return choose(self, logits)
sampling.Sampler.__call__ = slowly
from tfkit.cli import main
sys.exit(main())
"""


@pytest.fixture
def slow(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A model that takes a tenth of a second for each token."""
    environment = {**os.environ, "PYTHONPATH": str(Path(tfkit.__file__).parents[1])}
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW, "generate", "small.yaml", *PROMPT, *LIMIT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=folder,
        env=environment,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.slow
def test_it_streams(slow: subprocess.Popen[bytes], run: Run) -> None:
    assert slow.stdout is not None
    calls = []
    while piece := os.read(slow.stdout.fileno(), 1000):
        calls.append((time.monotonic(), piece))
    assert b"".join(piece for _, piece in calls).decode() == run("small.yaml", *PROMPT, *LIMIT)[0]
    assert len(calls) > 8
    assert calls[-1][0] - calls[0][0] > 1


@pytest.mark.slow
def test_interrupt(slow: subprocess.Popen[bytes]) -> None:
    assert slow.stdout is not None
    first = os.read(slow.stdout.fileno(), 1000)
    slow.send_signal(signal.SIGINT)
    out, err = slow.communicate(timeout=30)
    assert slow.returncode == 130
    assert err == b"interrupted\n"
    assert (first + out).endswith(b"\n")


@pytest.mark.slow
def test_broken_pipe(slow: subprocess.Popen[bytes]) -> None:
    assert slow.stdout is not None
    os.read(slow.stdout.fileno(), 1)
    slow.stdout.close()
    assert slow.wait(timeout=30) == 128 + signal.SIGPIPE
    assert slow.stderr is not None
    assert slow.stderr.read() == b""

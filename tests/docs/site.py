"""The built site, for tests in several processes."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

from .page import ROOT

OUT = ROOT / "out" / "docs"


@dataclass(frozen=True)
class Build:
    """The end of `python -m tools.docs.build`."""

    run: str
    """The run of pytest."""
    status: int
    errors: str

    @property
    def site(self) -> Path:
        """The folder of the site."""
        assert self.status == 0, self.errors
        return OUT / "site"


def build() -> Build:
    """Build the site once in a run of pytest: its processes wait for the first."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", str(os.getpid()))
    OUT.mkdir(parents=True, exist_ok=True)
    record = OUT / "build.json"
    with (OUT / "build.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if record.exists() and (last := Build(**json.loads(record.read_text()))).run == run:
            return last
        environment = {**os.environ, "TFKIT_DISABLE": ""}
        command = [sys.executable, "-m", "tools.docs.build"]
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        result = Build(run, done.returncode, done.stderr)
        record.write_text(json.dumps(asdict(result)))
    return result

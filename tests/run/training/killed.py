"""Kills runs of several processes with SIGKILL at random moments, restarts them each time, and damages checkpoints.

python -m tests.run.training.killed 60
python -m tests.run.training.killed 40 SEED 4
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from tests.tools.train.killed import check_latest
from tfkit.run.training.checkpoint import share_of
from tfkit.spec.header import read_header

from .launches import Launch, finish, forked, latest, numbers, options, start_forks, tensors
from .runs import same, write_run

SETS = ("batch.sequences=8", "model.dropout=0.2", "steps=60", "machine.shard=2", "checkpoint={every: 2, last: 2}")
LOST = "another process of the run has ended, or does not answer"


@dataclass
class Deaths:
    """What the kills met."""

    seed: int
    count: int = 0
    single: int = 0
    """Kills of one process only."""
    saving: int = 0
    """Kills while a checkpoint was written."""
    first: int = 0
    """Kills before the first checkpoint of a folder."""
    later: int = 0
    """Kills after a process had continued from a checkpoint, and had written none."""
    runs: int = 0
    stages: dict[str, int] = field(default_factory=dict)
    """The kills while a checkpoint was written, by what was there."""

    def __str__(self) -> str:
        return (
            f"seed {self.seed}: {self.count} deaths, {self.single} of a single process, {self.saving} in a save "
            f"{dict(sorted(self.stages.items()))}, {self.first} before the first checkpoint, "
            f"{self.later} before a further checkpoint; {self.runs} complete runs have the bits of an uninterrupted run"
        )


def stage(folder: Path) -> str | None:
    """The part of a checkpoint that is being written: parts of processes, the joined file, or the checkpoint."""
    names = [path.name for path in folder.glob(".*.new")]
    if any(name.startswith((".step-", ".latest.")) for name in names):
        return "checkpoint"
    shards = next(folder.glob(".shards.*.new/new"), None)
    if shards is None:
        return None
    return "joined" if any(shards.glob("*.safetensors")) else "parts"


def wait_for_moment(running: Launch, folder: Path, draw: random.Random) -> bool:
    """Return at a random moment: mostly in a save, else in steps; False for a moment while the processes begin."""
    before, target = latest(folder), draw.choice(["parts", "joined", "checkpoint", "parts", "any", "begin"])
    if target == "begin":
        time.sleep(draw.uniform(0, 2))
        return False
    while running.poll() is None and latest(folder) == before:
        time.sleep(0.02)
    time.sleep(draw.uniform(0, 0.6))
    while running.poll() is None and target != "any" and stage(folder) != target:
        time.sleep(0.0005)
    time.sleep(draw.choice([0, draw.uniform(0, 0.01)]))
    return True


def kill(running: Launch, folder: Path, draw: random.Random, deaths: Deaths) -> bool:
    """Kill all processes, or a single process, after which the others must end; False if they had ended before."""
    before = latest(folder)
    # Processes that have not connected wait for the launcher to end them, and forks have none.
    connected = wait_for_moment(running, folder, draw)
    ranks = forks(running) if connected and running.poll() is None else []
    rank = draw.choice(range(len(ranks))) if ranks and draw.random() < 0.5 else None
    reached = stage(folder)
    with contextlib.suppress(ProcessLookupError):
        if rank is not None:
            os.kill(ranks[rank], signal.SIGKILL)
        else:
            os.killpg(running.pid, signal.SIGKILL)
    status, _, errors = finish(running)
    if status == 0:
        return False
    if rank is not None:
        assert not any(Path(f"/proc/{number}").exists() for number in ranks)
        assert errors.count("error: ") == 1, errors
        assert LOST in errors, errors
    deaths.count += 1
    deaths.single += rank is not None
    deaths.saving += reached is not None
    if reached:
        deaths.stages[reached] = deaths.stages.get(reached, 0) + 1
    deaths.first += latest(folder) == -1
    deaths.later += latest(folder) == before != -1
    return True


def forks(running: Launch) -> list[int]:
    """The processes of a launch by forks."""
    return [int(word) for word in Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()]


def killed_at_random(folder: Path, times: int, seed: int, counts: tuple[int, ...] = (2, 4)) -> Deaths:
    """Kill runs so many times; each folder must continue, and end with the numbers and bits of an uninterrupted run."""
    draw, deaths = random.Random(seed), Deaths(seed)
    write_run(folder)
    words = ["small.yaml", *options(*SETS)]
    for count in counts:
        forked(folder, count, *words, "-o", f"uninterrupted-{count}")
    while deaths.count < times:
        count = counts[deaths.runs % len(counts)]
        name, uninterrupted = f"mortal-{deaths.runs}", folder / f"uninterrupted-{count}"
        done = False
        while not done:
            running = start_forks(folder, count, *words, "-o", name)
            if deaths.count < times:
                done = not kill(running, folder / name, draw, deaths)
                print(f"death {deaths.count} in {name} of {count}, step {latest(folder / name)}", flush=True)
            else:
                status, _, errors = finish(running)
                assert status == 0, errors
                done = True
            check_latest(folder / name)
        assert numbers(folder / name) == numbers(uninterrupted)
        for file in ("model", "optimizer"):
            assert same(tensors(folder / name, file), tensors(uninterrupted, file))
        assert not list((folder / name).glob(".*")), "leftover files"
        deaths.runs += 1
    return deaths


def check_damage(folder: Path, count: int) -> list[str]:
    """Damage a tensor in the share of each process, which must name it; return the notes of the errors."""
    write_run(folder)
    words, notes = ["small.yaml", *options(*SETS), "-o", "damaged"], []
    forked(folder, count, *words, "--stop-after", "2")
    path = folder / "damaged" / "step-2" / "model.safetensors"
    content, tensors = path.read_bytes(), read_header(path).tensors
    sizes = {name: entry.end - entry.start for name, entry in tensors.items()}
    for rank in range(count):
        name = share_of(sizes, rank, count)[0]
        changed = bytearray(content)
        changed[tensors[name].start] ^= 4
        path.write_bytes(changed)
        status, _, errors = finish(start_forks(folder, count, *words))
        notes.append(f"changed: `{name}`, read by process {rank} of {count}")
        assert status != 0
        assert errors.count("error: ") == 1, errors
        assert notes[-1] in errors, errors
    path.write_bytes(content)
    forked(folder, count, *words, "--stop-after", "4")
    return notes


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        seed = int(sys.argv[2]) if len(sys.argv) > 2 else int.from_bytes(os.urandom(4))
        counts = tuple(map(int, sys.argv[3:])) or (2, 4)
        print(f"seed {seed}", flush=True)
        print(killed_at_random(Path(name), int(sys.argv[1]), seed, counts), flush=True)
        print("\n".join(check_damage(Path(name), counts[-1])))

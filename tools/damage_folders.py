"""Damage the folders of runs, sweeps, tokens and models in every way, and run the commands that read them.

    python tools/damage_folders.py                    all cases
    python tools/damage_folders.py --count 100        100 cases, spread evenly: minutes
    python tools/damage_folders.py --only state.json  the cases whose file or damage contains `state.json`
    python tools/damage_folders.py --show             also what the commands print
    python tools/damage_folders.py --undamaged DIR    keep the undamaged folders in DIR, and use them the next time

A case is a file or a folder, and a damage: a flipped bit, a link to something outside, a pipe in its place, and so on.
Each command must succeed with the result that it has without the damage, or print one error or a warning. The table has
a cell for each command; the words in capitals are faults: a TRACEBACK, a HANG, something LOST from the folder,
something OUTSIDE that changed, and a result that differs in SILENCE. A file of a model folder has no digest: a change
that leaves the file valid is not detected there, and is not a fault.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "COLUMNS": "200", "NO_COLOR": "1"}

from safetensors import SafetensorError
from safetensors.torch import load_file

import tfkit.tools.eval_.evaluation  # imported once here, so that the forks of all commands need not import it
import tfkit.tools.generate.command
import tfkit.tools.runs.command
import tfkit.tools.save.save
import tfkit.tools.sweep.page
import tfkit.tools.sweep.sweep
import tfkit.tools.train.train  # noqa: F401
from tfkit.cli import main as run_command

TIMED_OUT = 98
SECONDS = 120
"""A command that takes longer hangs."""
RUN = """\
tfkit: 1
name: small
seed: 3
model:
  vocab_size: data.vocab_size
  d_model: 16
  graph:
    embedding: embedding
    decoder: {block: decoder, n_layers: 1, attention: {kind: mha, n_heads: 2}, ffn: {kind: relu, d_ff: 32}}
    head: lm_head
data: {kind: text, files: text.txt}
batch: {sequences: 4, length: 12}
steps: 6
optimizer: {kind: adamw, lr: 1e-2}
checkpoint: {every: 2, last: 2}
eval: {every: 3, splits: {val: {batches: 1}}}
callbacks: [{kind: spikes, window: 2}, ema]
"""
FILES = {
    "small.yaml": RUN,
    "tokens.yaml": "extends: small.yaml\ndata: {kind: tokens, files: tokens/train.npy, vocab_size: 300}\n",
    "start.yaml": "extends: small.yaml\nweights: model\n",
    "sweep.yaml": "tfkit: 1\nbase: small.yaml\nvariants: {relu: {}, gelu: {model.decoder.ffn.kind: gelu}}\nseeds: [0]\n"
    "compare: {to: relu, on: val.loss}\n",
    "text.txt": "".join(f"{number} sheep and {number * 7 % 13} goats went up the hill.\n" for number in range(150)),
}
SET_UP = """
train small.yaml -o run --stop-after 5
train small.yaml -o other --set seed=4 --stop-after 5
train small.yaml -o all
tokenizer text.txt --vocab-size 300 -o tokens/tokenizer.json
tokens text.txt --tokenizer tokens/tokenizer.json -o tokens/train.npy
train tokens.yaml -o of_tokens --stop-after 5
save run --layout tfkit -o model
save other --layout tfkit -o outside/model
"""
COMMANDS = {
    "run": {
        "train": "train run",
        "eval": "eval run",
        "generate": "generate run --prompt 12 --max-new-tokens 8",
        "save": "save run --layout tfkit -o saved",
        "runs": "runs run other",
    },
    "sweep": {
        "train": "sweep sweep.yaml -o sweep --so-far",
        "eval": "eval sweep/runs/RUN",
        "generate": "generate sweep/runs/RUN --prompt 12 --max-new-tokens 8",
        "save": "save sweep/runs/RUN --layout tfkit -o saved",
        "runs": "runs sweep/runs/RUN other",
    },
    "tokens": {
        "train": "train tokens.yaml -o of_tokens",
        "eval": "eval of_tokens",
        "generate": "generate of_tokens --tokens 12,7 --max-new-tokens 8",
        "save": "save of_tokens --layout tfkit -o saved",
        "runs": "runs of_tokens",
    },
    "model": {
        "train": "train start.yaml -o started",
        "eval": "eval run --weights model",
        "generate": "generate model --prompt 12 --max-new-tokens 8",
        "save": "save model --layout tfkit -o saved",
        "runs": "runs run other",
    },
}
"""The commands that follow a damage in a folder."""


# ---- damages ----


def _replaced(change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda path: _void(path.write_bytes(change(path.read_bytes())))


def _flipped(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :] if content else b"\x04"


def moved(make: Callable[[Path], object]) -> Callable[[Path], None]:
    """Move a file or a folder away, and create something else in its place."""

    def damage(path: Path) -> None:
        path.rename(path.with_name("moved"))
        if path.with_name("moved").is_dir():
            shutil.rmtree(path.with_name("moved"))
        else:
            path.with_name("moved").unlink()
        make(path)

    return damage


def _linked(target: str) -> Callable[[Path], None]:
    return moved(lambda path: path.symlink_to(Path(target).absolute()))


def linked_copy(path: Path) -> None:
    """Move a file outside, and create a link to it."""
    target = Path("outside", f"copy of {path.name}").absolute()
    shutil.move(path, target)
    path.symlink_to(target)


def from_other(path: Path) -> None:
    """Take the file from the folder of another run."""
    parts = path.parts
    source = Path("other", *parts[1:]) if parts[0] == "run" else Path("other", *parts[3:])
    source = source if source.is_file() else Path("outside/model", path.name)
    shutil.copyfile(source if source.is_file() else Path("outside/file"), path)


def _void(_: object) -> None: ...


DAMAGES: dict[str, Callable[[Path], None]] = {
    "missing": moved(_void),
    "empty": _replaced(lambda _: b""),
    "truncated": _replaced(lambda content: content[: len(content) // 2]),
    "a flipped bit": _replaced(_flipped),
    "a byte more": _replaced(lambda content: content + b"x"),
    "not UTF-8": _replaced(lambda _: b"\xff\xfe\x00"),
    "wrong JSON": _replaced(lambda _: b'{"step": [1], "format": "x"}'),
    "deep JSON": _replaced(lambda _: b"[" * 100_000),
    "of another run": from_other,
    "a folder": moved(Path.mkdir),
    "a pipe": moved(os.mkfifo),
    "a link to a file outside": _linked("outside/file"),
    "a link to a folder outside": _linked("outside/model"),
    "a link to its copy outside": linked_copy,
    "a dangling link": _linked("outside/new"),
    "a link to itself": moved(lambda path: path.symlink_to(path.name)),
    "a link to /dev/zero": _linked("/dev/zero"),
    "no permissions": lambda path: path.chmod(0),
}
OF_FOLDERS: dict[str, Callable[[Path], None]] = {
    "missing": moved(_void),
    "empty": moved(Path.mkdir),
    "a file": moved(Path.touch),
    "a pipe": moved(os.mkfifo),
    "a link to a folder outside": _linked("outside/model"),
    "a link to a new folder outside": _linked("outside/new"),
    "a link to itself": moved(lambda path: path.symlink_to(path.name)),
    "a foreign file": lambda path: _void(path.joinpath("notes.txt").write_text("notes", encoding="utf-8")),
    "read-only": lambda path: path.chmod(0o555),
}


def _staged(path: Path) -> None:
    """Create the staging folder of a process that seems to have been killed."""
    path.mkdir()
    (path / "lock").touch()
    (path / "old").symlink_to(Path("outside").absolute())


ADDED: dict[str, Callable[[Path], object]] = {
    "run/notes.txt": Path.touch,
    "run/step-6": lambda path: shutil.copytree("outside/model", path),
    "run/step-6 ": Path.mkdir,
    "run/step-999": lambda path: shutil.copytree("outside/model", path),
    "run/step-0": lambda path: path.symlink_to(Path("outside/model").absolute()),
    "run/step-6  ": lambda path: path.with_name("step-6").symlink_to(Path("outside/model").absolute()),
    "run/tb": lambda path: path.symlink_to(Path("outside/model").absolute()),
    "run/wandb.id": lambda path: path.symlink_to(Path("outside/new").absolute()),
    "run/mlflow.id": os.mkfifo,
    "run/.step-6.0123abcd.new": _staged,
    "sweep/models": lambda path: path.symlink_to(Path("outside").absolute()),
    "model/config.json": lambda path: path.write_text("{}", encoding="utf-8"),
    "model/pytorch_model.bin": lambda path: path.write_bytes(b"\x80\x04."),
}  # fmt: skip
"""Things that appear in a folder."""


@dataclass(frozen=True)
class Case:
    """A damage, and the folder whose commands follow."""

    path: str
    damage: str
    do: Callable[[Path], object]

    @property
    def top(self) -> str:
        """The damaged folder."""
        return self.path.partition("/")[0]


def cases() -> Iterator[Case]:
    """Yield each file and folder with each damage."""
    for top in COMMANDS:
        run = next(iter(sorted(Path("sweep/runs").iterdir())))
        paths = sorted(Path(top).rglob("*"))
        for path in paths:
            if top == "sweep" and path.is_relative_to("sweep/runs") and path != run and path.parent != run:
                continue  # a run of a sweep is a run: its checkpoints are damaged there
            damages = OF_FOLDERS if path.is_dir() else DAMAGES
            yield from (Case(str(path), name, damage) for name, damage in damages.items())
        for name, create in ADDED.items():
            if name.startswith(f"{top}/"):
                yield Case(name.rstrip(), f"added, way {len(name) - len(name.rstrip()) + 1}", create)


# ---- commands ----


@dataclass(frozen=True)
class Done:
    """A command that has ended: its exit status and what it printed."""

    status: int
    out: str
    err: str


def run(line: str) -> Done:
    """Run a command of tfkit in a fork of this process."""
    with tempfile.TemporaryFile("w+", encoding="utf-8") as out, tempfile.TemporaryFile("w+", encoding="utf-8") as err:
        child = os.fork()
        if child == 0:
            status = 70
            try:
                os.setsid()
                for number, file in enumerate((out, err), 1):
                    os.dup2(file.fileno(), number)
                sys.argv = ["tfkit", *line.split()]
                status = run_command(line.split())
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(status)
        status = wait(child)
        out.seek(0)
        err.seek(0)
        return Done(status, out.read(), err.read())


def wait(child: int) -> int:
    """Wait for a session leader. Return its exit status; after the timeout, kill the session and return TIMED_OUT."""
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return TIMED_OUT


State = dict[str, object]


def state_of(folder: Path) -> State:
    """Return the contents of a folder, without following links: bytes, targets of links, and modes of all else."""
    state: State = {}
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        if stat.S_ISLNK(mode):
            state[str(path)] = os.readlink(path)
        elif stat.S_ISREG(mode):
            with permitted(path, mode):
                state[str(path)] = path.read_bytes()
        else:
            state[str(path)] = stat.S_IFMT(mode)
    return state


@contextlib.contextmanager
def permitted(path: Path, mode: int) -> Iterator[None]:
    """Make a file readable for a moment."""
    changed = not mode & stat.S_IRUSR
    if changed:
        path.chmod(mode | stat.S_IRUSR)
    yield
    if changed:
        path.chmod(mode)


def result_of(command: str, line: str, done: Done) -> object:
    """Return what a command computed: what it printed, or the weights that it wrote."""
    if command in ("eval", "generate"):
        return done.out
    folder = {"save": "saved", "train": line.split()[-1]}.get(command)
    if folder is None or line.startswith("sweep"):
        return None  # numbers for people, which the page of the run also has
    path = Path(folder, "step-6") if command == "train" else Path(folder)
    try:
        tensors = load_file(path / "model.safetensors")
    except (OSError, SafetensorError) as error:
        return str(error)
    return {name: tensor.numpy().tobytes() for name, tensor in tensors.items()}


def content_of(state: State, name: str) -> object:
    """Return the content of a file, and of `run.json` all but its sessions: a failed training adds a session."""
    content = state.get(name)
    if name.endswith("run.json") and isinstance(content, bytes):
        with contextlib.suppress(ValueError, TypeError, RecursionError):
            return {**json.loads(content), "sessions": None}
    return content


IGNORED = ("lock", ".sweep", ".digest")
"""Ends of the names of files that each command may write."""


def fault(case: Case, command: str, line: str, done: Done, before: tuple[State, State], expected: object) -> str:
    """Return the cell of a command in the table."""
    folder, outside = before
    now = state_of(Path(case.top))
    if done.status == TIMED_OUT:
        return "HANG"
    if "Traceback" in done.err or done.status not in (0, 1, 2) or (done.status and "rror: " not in done.err):
        return "TRACEBACK"
    if state_of(Path("outside")) != outside:
        return "OUTSIDE"
    # A training may fail after a checkpoint, for instance because it cannot write `ema`.
    trained = command == "train" and (not done.status or any(name.endswith("step-6/state.json") for name in now))
    unchecked = [name for name in folder if not name.endswith(IGNORED) and (not trained or foreign(name, case))]
    if any(content_of(now, name) != content_of(folder, name) for name in unchecked):
        return "LOST"
    if done.status:
        return "error"
    if "warning" in done.err:
        return "warning"
    silent = result_of(command, line, done) != expected
    return "SILENT" if silent and not undetectable(case) else "differs" if silent else "ok"


def foreign(name: str, case: Case) -> bool:
    """Return True for a file that a successful training may not change."""
    return name.startswith(case.path) and (case.damage.startswith(("added", "a foreign")) or "moved" in name)


def undetectable(case: Case) -> bool:
    """Return True for a valid change of a file without a digest."""
    return case.top == "model"


# ---- the table ----


def main() -> int:
    """Run all cases, and return 1 if there is a fault."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", metavar="TEXT", help="only cases that contain it")
    parser.add_argument("--count", type=int, metavar="N", help="only N cases, spread evenly")
    parser.add_argument("--show", action="store_true", help="print what the commands print")
    parser.add_argument("--undamaged", type=Path, metavar="DIR", help="keep the undamaged folders in DIR, or use them")
    options = parser.parse_args()
    start = time.monotonic()
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory(prefix="damaged-") as home:
        os.chdir(home)
        pristine = (options.undamaged or Path(home, "undamaged")).absolute()
        if not pristine.is_dir():
            set_up(pristine)
        os.chdir(pristine)
        chosen = [case for case in cases() if options.only in f"{case.path}: {case.damage}"]
        count = min(options.count or len(chosen), len(chosen))
        chosen = [chosen[len(chosen) * number // count] for number in range(count)]
        os.chdir(home)
        expected = {top: dict(results(pristine, top, None, options.show)) for top in {case.top for case in chosen}}
        print(f"{'':60} {' '.join(f'{name:10}' for name in COMMANDS['run'])}")
        for case in chosen:
            cells = dict(results(pristine, case.top, case, options.show, expected[case.top]))
            counts.update(map(str, cells.values()))
            name = f"{case.path.replace(os.sep, '/')}: {case.damage}"
            print(f"{name:60} {' '.join(f'{cell!s:10}' for cell in cells.values())}", flush=True)
        os.chdir("/")
    faults = sum(count for cell, count in counts.items() if cell.isupper())
    texts = ", ".join(f"{count:,} {cell}" for cell, count in sorted(counts.items()))
    seconds = time.monotonic() - start
    print(f"{len(chosen):,} cases, {counts.total():,} commands in {seconds:,.0f} s: {texts}; {faults} faults")
    return int(faults > 0)


def set_up(folder: Path) -> None:
    """Train the runs, and write the files that are damaged."""
    (folder / "tokens").mkdir(parents=True)
    (folder / "outside").mkdir()
    os.chdir(folder)
    for name, text in FILES.items():
        Path(name).write_text(text, encoding="utf-8")
    Path("outside/file").write_text("outside\n", encoding="utf-8")
    for line in SET_UP.strip().splitlines():
        done = run(line)
        assert done.status == 0, (line, done)
    done = run("sweep sweep.yaml -o sweep --commands")
    for line in done.out.splitlines():
        done = run(line.removeprefix("tfkit "))
        assert done.status == 0, (line, done)
    assert run("sweep sweep.yaml -o sweep --so-far").status == 0


def results(
    pristine: Path, top: str, case: Case | None, show: bool, expected: dict[str, object] | None = None
) -> Iterator[tuple[str, object]]:
    """Yield the result of each command without a damage, or its cell in the table, each in a copy of the folders."""
    for command, template in COMMANDS[top].items():
        copy = Path("copy").absolute()
        remove(copy)
        shutil.copytree(pristine, copy, symlinks=True)
        os.chdir(copy)
        line = template.replace("RUN", min(path.name for path in Path("sweep/runs").iterdir()))
        if case is not None:
            case.do(Path(case.path))
        before = state_of(Path(top)), state_of(Path("outside"))
        done = run(line)
        if case is None:
            assert done.status == 0, (line, done)
            yield command, result_of(command, line, done)
        else:
            assert expected is not None
            cell = fault(case, command, line, done, before, expected[command])
            if show or cell.isupper():
                print(f"--- {case.path}: {case.damage}: tfkit {line}: {cell} ({done.status})")
                print((done.err or done.out)[-1500:])
            yield command, cell
        os.chdir(copy.parent)


def remove(folder: Path) -> None:
    """Remove a folder, whatever its permissions are."""
    if folder.exists():
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir() and not path.is_symlink():
                path.chmod(0o755)
        shutil.rmtree(folder)


if __name__ == "__main__":
    sys.exit(main())

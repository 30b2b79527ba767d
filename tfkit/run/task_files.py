"""Tasks as files: rows with the columns of data `choices` or `pairs`, or a task of lm-evaluation-harness in YAML.

A file is read once, until it changes: the runs of a sweep share their tasks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from tfkit.errors import Invalid, closest_name, listing, quoted
from tfkit.run.harness_tasks import read_harness_task
from tfkit.run.questions import Question, TaskFile, choice_question, pair_question, stamp_of
from tfkit.run.read_rows import SUFFIXES, Row, read_rows
from tfkit.spec.extending import short_path

FOLDER = Path(__file__).parents[1] / "data" / "tasks"
CHOICE_METRICS = ("acc", "acc_norm", "acc_bytes")
"""Metrics of questions with several continuations."""
PAIR_METRICS = ("acc", "perplexity")
"""Metrics of questions with a single continuation."""
CHOICE_COLUMNS = ("prompt", "choices", "answer")
PAIR_COLUMNS = ("source", "target")
YAML = (".yaml", ".yml")


_FILES: dict[Path, TaskFile] = {}


def shipped_tasks() -> list[str]:
    """Return the names of the tasks that come with tfkit."""
    return sorted(path.stem for path in FOLDER.glob("*.jsonl"))


def read_task_file(name: str) -> TaskFile:
    """Read a task that comes with tfkit, or the file of a path.

    Raises `Invalid` for a file that is not a task, and SpecError for a YAML file with errors.
    """
    path = FOLDER / f"{name}.jsonl" if name in shipped_tasks() else Path(name)
    if not path.exists():
        near = closest_name(path.name, shipped_tasks())
        help = f"a task with a similar name exists: `{near}`" if near else "write the path of a file"
        notes = (f"tasks that come with tfkit: {listing(shipped_tasks())}",)
        raise Invalid("file", f"there is no task {quoted(str(short_path(path)))}", notes=notes, help=help)
    task = _FILES.get(path)
    if task is None or any(not file.exists() or stamp_of(file) != stamp for file, stamp in task.stamps.items()):
        task = _FILES[path] = read_harness_task(path) if path.suffix in YAML else _task_in_rows(path)
    return task


def _task_in_rows(path: Path) -> TaskFile:
    if path.suffix not in SUFFIXES and not path.is_dir():
        help = f"use a file with rows, {', '.join(SUFFIXES)}, or a task of lm-evaluation-harness, .yaml"
        suffix = quoted(path.suffix) if path.suffix else "no suffix"
        raise Invalid("file", f"{quoted(str(short_path(path)))} must be a task; got {suffix}", help=help)
    try:
        rows = list(read_rows(path))
        questions = tuple(map(_question_reader(path, rows), rows))
    except Invalid as error:
        correction = (error.help or "").partition(",")[0] or None  # the columns have fixed names
        raise Invalid("file", error.message, notes=error.notes, help=correction) from error
    return TaskFile(path.stem, questions, _metrics_of(questions), stamps={path: stamp_of(path)})


def _metrics_of(questions: Sequence[Question]) -> tuple[str, ...]:
    """Return the metrics of a task. `acc_bytes` equals `acc_norm` if each character has a single byte."""
    if len(questions[0].targets) == 1:
        return PAIR_METRICS
    plain = all(target.isascii() for question in questions for target in question.targets)
    return CHOICE_METRICS[:2] if plain else CHOICE_METRICS


def _question_reader(path: Path, rows: Sequence[Row]) -> Callable[[Row], Question]:
    """Return the function that reads the rows; raise `Invalid` without rows, and for unknown columns."""
    if not rows:
        raise Invalid("files", f"{quoted(str(short_path(path)))} must have at least one row")
    if "choices" in rows[0].values:
        return lambda row: choice_question(row, *CHOICE_COLUMNS)
    if "target" in rows[0].values:
        return lambda row: pair_question(row, *PAIR_COLUMNS)
    expected = " or ".join(", ".join(f"`{name}`" for name in columns) for columns in (CHOICE_COLUMNS, PAIR_COLUMNS))
    help = "rename the columns, or write a task in YAML: `doc_to_text: COLUMN`"
    notes = (f"columns: {listing(map(str, rows[0].values))}",)
    raise Invalid("files", f"{rows[0].location} must have the columns {expected}", notes=notes, help=help)

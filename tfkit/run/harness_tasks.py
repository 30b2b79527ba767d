"""Tasks of lm-evaluation-harness: files in YAML that describe multiple choice, or continuations, over local rows.

Each key has its meaning in lm-evaluation-harness 0.4.13 (https://github.com/EleutherAI/lm-evaluation-harness).
A key that would change the questions, and that tfkit does not support, is an error. Templates run in the sandbox of
Jinja: a task is data.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, Invalid, Span, SpecError, listing, quoted, similar_name_help
from tfkit.run.questions import Question, TaskFile, stamp_of
from tfkit.run.read_rows import Row, read_rows
from tfkit.spec import syntax, tree
from tfkit.spec.extending import short_path
from tfkit.spec.source import plain_data, read

FORMATS = ("json", "csv", "parquet", "arrow")
"""Values of `dataset_path` that stand for local files."""
METRICS = {"multiple_choice": ("acc", "acc_norm", "acc_bytes"), "loglikelihood": ("perplexity", "acc")}
"""The metrics of each `output_type`."""
DEFAULT_METRICS = {"multiple_choice": ("acc", "acc_norm"), "loglikelihood": ("perplexity", "acc")}
AGGREGATIONS = {"perplexity": "perplexity"}
"""The aggregation of a metric over questions; `mean` for metrics that are not listed."""
USED = frozenset(
    """
    task output_type dataset_path dataset_kwargs test_split validation_split doc_to_text doc_to_choice doc_to_target
    target_delimiter description metric_list num_fewshot repeats include
    """.split()  # noqa: SIM905
)
TEXTS = (
    *("task", "output_type", "dataset_path", "test_split", "validation_split"),
    *("doc_to_text", "target_delimiter", "description"),
)
"""Keys whose values must be texts."""
IDLE = frozenset(
    """
    tag task_alias metadata should_decontaminate doc_to_decontamination_query training_split fewshot_split
    fewshot_delimiter fewshot_config dataset_name generation_kwargs
    """.split()  # noqa: SIM905
)
"""Keys without effect on questions without examples."""
UNSUPPORTED = frozenset(
    """
    process_docs process_results doc_to_image doc_to_audio custom_dataset class unsafe_code use_prompt gen_prefix
    filter_list group
    """.split()  # noqa: SIM905
)
FUNCTION = re.compile(r"!function\s+(\S+)")


def read_harness_task(path: Path) -> TaskFile:
    """Read a task; raise SpecError with its file, line and column for a key that tfkit does not support."""
    root, files = _merged(path, ())
    return _HarnessTask(path, root).read(files)


def _merged(path: Path, above: tuple[Path, ...]) -> tuple[tree.Mapping, list[Path]]:
    """Return a file with the keys of the files that it includes, and all of these files."""
    try:
        root = read(path, name=str(short_path(path)))
    except SpecError as error:
        raise SpecError(*map(_of_function, error.diagnostics)) from error
    included = root.items.get("include")
    if included is None or plain_data(included) is None:
        return root, [path]
    items: dict[str, tree.Node] = {}
    keys: dict[str, Span] = {}
    files = [path]
    for node in included.items if isinstance(included, tree.Sequence) else (included,):
        name = plain_data(node)
        if not isinstance(name, str) or not (file := path.parent / name).is_file():
            help = "write the path of a file, relative to the folder of this file"
            raise SpecError(
                Diagnostic(f"`include` must be a local file; got {quoted(str(name))}", node.span, help=help)
            )
        if file in (*above, path):
            raise SpecError(Diagnostic("a file cannot include itself", node.span))
        part, further = _merged(file, (*above, path))
        items, keys, files = {**items, **part.items}, {**keys, **part.keys}, [*files, *further]
    return tree.Mapping({**items, **root.items}, {**keys, **root.keys}, root.span), files


def _of_function(diagnostic: Diagnostic) -> Diagnostic:
    """Return the error for a tag, with the function that it names."""
    if diagnostic.message != syntax.TAGS or diagnostic.span is None:
        return diagnostic
    line = diagnostic.span.source.line(diagnostic.span.line)
    match = FUNCTION.match(line, diagnostic.span.column - 1)
    key = line.partition(":")[0].strip("- \"'")
    value = f"`{match[0]}`" if match else quoted(line[diagnostic.span.column - 1 :])
    help = "write the texts to a file with rows, and name its columns"
    return replace(diagnostic, message=f"`{key}` must not run code of the task; got {value}", help=help)


@dataclass(frozen=True)
class _HarnessTask:
    """The keys of a task."""

    path: Path
    root: tree.Mapping

    def read(self, files: list[Path]) -> TaskFile:
        """Return the questions of the task."""
        self._check_keys()
        self._check_values()
        kind = self._value("output_type")
        if kind not in METRICS:
            expected = " or ".join(METRICS)
            raise self._error("output_type", f"`output_type` must be {expected}; got {quoted(str(kind))}")
        metrics = self._metrics(kind)
        delimiter = self._value("target_delimiter", " ")
        path = self._rows_file()
        try:
            rows = list(read_rows(path))
        except Invalid as error:
            raise self._error("dataset_kwargs", error.message, notes=error.notes, help=error.help) from error
        if not rows:
            raise self._error("dataset_kwargs", f"{quoted(str(short_path(path)))} must have at least one row")
        several = kind == "multiple_choice"
        questions = tuple(map(self._choice_question if several else self._pair_question, rows))
        name = self._value("task", self.path.stem)
        stamps = {file: stamp_of(file) for file in (*files, path)}
        return TaskFile(str(name), questions, metrics, delimiter if several else "", stamps)

    # ---- keys ----

    def _check_keys(self) -> None:
        """Raise SpecError for a key that would change the questions or their scores."""
        for name, node in self.root.items.items():
            value = plain_data(node)
            if name in IDLE or value is None:
                continue
            if name in UNSUPPORTED or (name == "task" and isinstance(value, list)):
                help = "write the texts to a file with rows, or use lm-evaluation-harness on the folder of `tfkit save`"
                raise self._error(name, f"a task with the key `{name}` cannot be read", help=help)
            if name not in USED:
                near = similar_name_help("a key", name, sorted(USED))
                raise self._error(name, f"`{name}` is not a key of a task", help=near)

    def _check_values(self) -> None:
        """Raise SpecError for a missing value, and for a value that tfkit does not support."""
        for name in TEXTS:
            if not isinstance(value := self._value(name, ""), str):
                raise self._error(name, f"`{name}` must be a text; got {quoted(str(value))}")
        for name in ("output_type", "dataset_path", "doc_to_text", "doc_to_target"):
            if self._value(name) is None:
                raise SpecError(Diagnostic(f"the key `{name}` is missing", self.root.span))
        if (several := self._value("output_type") == "multiple_choice") != (self._value("doc_to_choice") is not None):
            message = "`doc_to_choice` is missing" if several else "`doc_to_choice` has no effect on `loglikelihood`"
            raise self._error("output_type" if several else "doc_to_choice", message)
        for name, usual in (("num_fewshot", 0), ("repeats", 1)):
            if (number := self._value(name, usual)) != usual:
                help = "remove the key" if name == "repeats" else "write the examples into the prompts of the rows"
                raise self._error(name, f"`{name}` must be {usual}; got {number}", help=help)

    def _metrics(self, kind: str) -> tuple[str, ...]:
        """Return the names in `metric_list`; raise SpecError for a metric or aggregation that tfkit does not have."""
        node = self.root.items.get("metric_list")
        if node is None or plain_data(node) is None:
            return DEFAULT_METRICS[kind]
        names = []
        for item in node.items if isinstance(node, tree.Sequence) else ():
            entry = plain_data(item)
            name = entry.get("metric") if isinstance(entry, dict) else entry
            if not isinstance(name, str) or name not in METRICS[kind]:
                help = f"choose some of {', '.join(METRICS[kind])}"
                raise SpecError(Diagnostic(f"there is no metric {quoted(str(name))} of a task", item.span, help=help))
            usual, entry = AGGREGATIONS.get(name, "mean"), entry if isinstance(entry, dict) else {}
            if entry.get("aggregation", usual) != usual:
                message = f"the `aggregation` of `{name}` must be {usual}; got {quoted(str(entry['aggregation']))}"
                raise SpecError(Diagnostic(message, item.span))
            if further := sorted(set(entry) - {"metric", "aggregation", "higher_is_better"}):
                raise SpecError(Diagnostic(f"`{further[0]}` of a metric cannot be set", item.span, help="remove it"))
            names.append(name)
        if not names:
            raise self._error("metric_list", "`metric_list` must be a list of metrics", help="write `[{metric: acc}]`")
        return tuple(dict.fromkeys(names))

    def _rows_file(self) -> Path:
        """Return the file with the rows of the split that is evaluated."""
        help = "save the rows to a file, and write `dataset_path: json` and `dataset_kwargs: {data_files: FILE.jsonl}`"
        if (form := self._value("dataset_path")) not in FORMATS:
            message = f"`dataset_path` must be a format of local files, {listing(FORMATS)}; got {quoted(str(form))}"
            raise self._error("dataset_path", message, help=help)
        options = self._value("dataset_kwargs")
        if not isinstance(options, dict) or set(options) != {"data_files"}:
            raise self._error("dataset_kwargs", "`dataset_kwargs` must have the key `data_files` only", help=help)
        split = self._value("test_split") or self._value("validation_split")
        if split is None:
            raise SpecError(Diagnostic("the key `test_split` or `validation_split` is missing", self.root.span))
        files = options["data_files"]
        parts = files if isinstance(files, dict) else {"train": files}
        if split not in parts:
            message = f"`data_files` must have the split {quoted(str(split))}; got {listing(map(str, parts))}"
            raise self._error("dataset_kwargs", message)
        name = parts[split][0] if isinstance(parts[split], list) and len(parts[split]) == 1 else parts[split]
        if not isinstance(name, str):
            raise self._error("dataset_kwargs", f"`data_files` must be the path of a file; got {quoted(str(name))}")
        for folder in (self.path.parent, Path()):  # the harness resolves paths from the current folder
            if (folder / name).exists():
                return folder / name
        help = "write a path relative to the folder of this file"
        raise self._error("dataset_kwargs", f"there is no file {quoted(name)}", help=help)

    # ---- questions ----

    def _choice_question(self, row: Row) -> Question:
        choices = self._choices(row)
        target = self._of_row("doc_to_target", row)
        if isinstance(target, str) and target.isdigit() and not self._is_column("doc_to_target", row):
            target = int(target)
        if isinstance(target, str) and target in choices:
            target = choices.index(target)
        if not isinstance(target, int) or not 0 <= target < len(choices):
            message = f"`doc_to_target` must be one of the choices, or an index from 0 to {len(choices) - 1}"
            raise self._row_error("doc_to_target", row, message, target)
        prompt = self._prompt(row)
        if prompt.isdigit() and not self._is_column("doc_to_text", row):
            raise self._row_error(
                "doc_to_text", row, "`doc_to_text` must be a text, and not the index of a choice", prompt
            )
        return Question(row, self._description(row) + prompt, choices, int(target))

    def _pair_question(self, row: Row) -> Question:
        target = self._of_row("doc_to_target", row)
        if not isinstance(target, str) or not target:
            raise self._row_error("doc_to_target", row, "`doc_to_target` must be a text", target)
        return Question(row, self._description(row) + self._prompt(row), [target])

    def _prompt(self, row: Row) -> str:
        prompt = self._of_row("doc_to_text", row)
        if not isinstance(prompt, str):
            raise self._row_error("doc_to_text", row, "`doc_to_text` must be a text", prompt)
        return prompt

    def _description(self, row: Row) -> str:
        return str(self._of_row("description", row)) if self._value("description") else ""

    def _choices(self, row: Row) -> list[str]:
        value = self._value("doc_to_choice")
        if isinstance(value, str):
            choices = self._of_row("doc_to_choice", row)
            if not self._is_column("doc_to_choice", row):
                with suppress(ValueError, SyntaxError, MemoryError, RecursionError):  # of a text that is no list
                    choices = ast.literal_eval(choices)
        else:
            choices = list(value.values()) if isinstance(value, dict) else value
        if not isinstance(choices, list) or len(choices) < 2 or not all(isinstance(c, str) and c for c in choices):
            raise self._row_error("doc_to_choice", row, "`doc_to_choice` must be a list of two texts or more", choices)
        return choices

    def _is_column(self, name: str, row: Row) -> bool:
        return self._value(name) in row.values

    def _of_row(self, name: str, row: Row) -> Any:
        """Return the value of a key for a row: a column, or a rendered template."""
        value = self._value(name)
        if not isinstance(value, str):
            return value
        if value in row.values:
            return row.values[value]
        try:
            return _rendered(value, row.values)
        except ImportError as error:
            help = 'install it: pip install "tfkit[tasks]"'
            raise self._error(name, "a template cannot be rendered without Jinja", help=help) from error
        except Exception as error:  # a template may fail in any way
            cause = " ".join(str(error).split()) or type(error).__name__
            notes = (f"columns: {listing(map(str, row.values))}",)
            raise self._error(name, f"`{name}` cannot be rendered for {row.location}: {cause}", notes=notes) from error

    # ---- values and errors ----

    def _value(self, name: str, usual: Any = None) -> Any:
        value = plain_data(self.root.items[name]) if name in self.root.items else None
        return usual if value is None else value

    def _error(self, name: str, message: str, *, notes: tuple[str, ...] = (), help: str | None = None) -> SpecError:
        node = self.root.items.get(name)
        span = self.root.span if node is None else self.root.keys[name] if name in UNSUPPORTED else node.span
        return SpecError(Diagnostic(message, span, notes=notes, help=help))

    def _row_error(self, name: str, row: Row, message: str, value: Any) -> SpecError:
        return self._error(name, f"{message}; got {quoted(str(value))}", notes=(f"in {row.location}",))


def _rendered(template: str, values: Mapping[str, Any]) -> str:
    """Return a template with the values of a row."""
    if not any(mark in template for mark in ("{{", "{%", "{#")):
        return template
    return str(_compiled(template).render(**values))


@cache
def _compiled(template: str) -> Any:
    from jinja2 import StrictUndefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, keep_trailing_newline=True)
    environment.filters["regex_replace"] = lambda text, pattern, new, count=0: re.sub(pattern, new, text, count=count)
    return environment.from_string(template)

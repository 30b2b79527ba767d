"""Export of a model to another format. A file gets its name only if it is complete and equals the model.

To compare it, the exported file is read again and run at shapes that differ from the shapes of the export.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import fx

from tfkit.arguments import AnyPath, checked
from tfkit.building.builder import build, evaluation_mode, graph_of
from tfkit.building.model import BuiltModel, complete_model
from tfkit.checkpoint.files import BROKEN, not_finite
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import AnyPlugins, load_plugins
from tfkit.tools.common.atomic_files import check_file, extras_of, fresh_file
from tfkit.tools.common.memory_needs import size_of
from tfkit.tools.common.model_inputs import export_inputs
from tfkit.tools.common.units import bytes_text
from tfkit.tools.export.formats import Format, formats_of
from tfkit.tools.export.verification import Check, check

MARGIN = 2**24
"""Maximum size of a file in bytes, in addition to the weights."""


@dataclass(frozen=True)
class Exported:
    """The exported files, and their differences from the model.

    Attributes:
        name: name of the model.
        format: name of the format.
        files: the written files; the first is the requested file.
        bytes: the total size of the files.
        checks: the comparisons of the file, read again, with the model.
        difference: the largest difference in these comparisons.
    """

    name: str
    format: str
    files: tuple[str, ...]
    bytes: int
    checks: tuple[Check, ...]
    difference: float


@checked
def export(
    model: BuiltModel,
    path: AnyPath,
    *,
    format: str | None = None,
    stage: Callable[[str], Any] = lambda _: None,
    plugins: AnyPlugins | None = None,
) -> Exported:
    """Write a model to a file that runs without tfkit.

    The file is first written to a temporary folder, read again, and compared with the model at shapes that differ from
    the shapes of the export. It is moved to `path` only if it equals the model. An error, an interrupt or a full disk
    leaves nothing behind, and does not change an existing file.

    Args:
        model: a model that `tfkit.build` returned; it is written in eval mode.
        path: the file; its folder must exist.
        format: `torchscript`, `pt2`, `aoti`, `onnx`, `safetensors`, or the format of a plugin; by default, the format
            of the suffix.
        stage: a function that is called with the name of each stage when it begins.
        plugins: the plugins whose formats are available.

    Raises:
        SpecError: the format does not exist or cannot represent the model; the file differs from the model, in which
            case the message names the first component that differs; a weight is not finite; or the file cannot be
            written.
        ValueError: the model was not built by tfkit, or its parameters are sharded.
    """
    model, path = complete_model(model), Path(path)
    chosen = formats_of(plugins or load_plugins()).choose(path, format)
    check_file(path, device=False)
    if broken := not_finite(model.state_dict()):
        raise SpecError(
            Diagnostic(
                f"the model has {BROKEN}", notes=(broken,), help="use `tfkit.save`, which can write such a model"
            )
        )
    path = Path(os.path.realpath(path)) if path.is_symlink() else path  # the target of a link is replaced, not the link
    with evaluation_mode(model), _convert_errors(path, ""), fresh_file(path) as new:
        stage(f"writing {path}")
        with _convert_errors(path, chosen.name):
            _check_room(model, new.parent)
            chosen.write(model, export_inputs(model), new)
        stage("comparing it with the model")
        with _convert_errors(path, chosen.name, "read again"):
            checks = check(model, chosen.open(new, model), chosen)
        parts = sorted(file.relative_to(new.parent) for file in extras_of(new).rglob("*"))
    files = [path, *(path.parent / part for part in parts)]
    size = sum(file.stat().st_size for file in files)
    largest = max((result.difference for result in checks), default=0.0)
    return Exported(graph_of(model).name, chosen.name, tuple(map(str, files)), size, checks, largest)


def check_format(graph: Graph, format: Format) -> None:
    """Raise SpecError if a format cannot represent a model, before its weights are read."""
    reasons = format.refusals(build(graph, device="meta").eval())
    if reasons:
        raise SpecError(*reasons)


def _check_room(model: fx.GraphModule, folder: Path) -> None:
    """Raise OSError if the disk is too full for the file: torch's writers would abort the process."""
    needed = size_of(model) + MARGIN
    probe = folder / "room"
    if not hasattr(os, "posix_fallocate"):  # macOS
        return
    try:
        with probe.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, needed)
    except OSError as error:
        raise OSError(error.errno, f"{error.strerror}; it takes up to {bytes_text(needed)}") from error
    finally:
        probe.unlink(missing_ok=True)


@contextmanager
def _convert_errors(path: Path, format: str, what: str = "written") -> Iterator[None]:
    """Convert any error of a format to a SpecError."""
    try:
        yield
    except SpecError:
        raise
    except Exception as error:
        text = getattr(error, "strerror", None) or str(error)
        cause = next((line.strip() for line in text.splitlines() if line.strip()), type(error).__name__)
        words = f" as {format}" if format else ""
        raise SpecError(Diagnostic(f"{quoted(str(path))} cannot be {what}{words}: {cause}")) from error

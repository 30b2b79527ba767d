"""Profiles of one or several models, and the folder that they are written to, completely or not at all."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import torch

from tfkit.arguments import AnyPath, Limit, Natural, Positive, checked
from tfkit.building.edits import AnyModel, as_model
from tfkit.building.placement import AnyDevice, AnyDtype, device_of, dtype_of
from tfkit.errors import Diagnostic, SpecError, listing, quoted
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import fixed_length, length_of, max_len, max_len_text
from tfkit.spec.header import read_object
from tfkit.tools.common.atomic_files import names_in, written_folder
from tfkit.tools.common.modes import Mode
from tfkit.tools.profile.limits import limits_of
from tfkit.tools.profile.measurement import count_steps, measure_model
from tfkit.tools.profile.profiled_step import Settings
from tfkit.tools.profile.result import Profile, summed_rows

LENGTH = 128
Steps: TypeAlias = Annotated[int, Limit(minimum=2)]


@checked
def profile(graph: AnyModel, **options: Any) -> Profile:
    """Run a model for some steps, and report time and memory by component, node and layer.

        profile = tfkit.profile("gpt2", mode="decode", dtype="bfloat16", batch=8, length=512)
        profile.plain_step                                    # seconds of a step, without the profiler

    Args:
        graph: the name, path or mapping of a spec, the result of `load`, or a built model.
        options: `device`, `mode`, `dtype`, `compile`, `batch`, `length`, `steps`, `warmup`, `directory`, `weights`,
            `allow_change` and `on_step`, as `tfkit.tools.profile.models.profile_models` describes them.

    Returns:
        The profile. Times are seconds, sizes bytes.

    Raises:
        SpecError: the model cannot run in this mode, or memory is too small.
        ValueError: a count is out of its range.
    """
    return profile_models([graph], **options)[0]


@checked
def profile_models(
    graphs: Sequence[AnyModel],
    *,
    device: AnyDevice | None = None,
    mode: Mode = "train",
    dtype: AnyDtype | None = None,
    compile: bool = False,
    batch: Positive = 1,
    length: Positive | None = None,
    steps: Steps = 5,
    warmup: Natural = 2,
    directory: AnyPath | None = None,
    weights: AnyPath | Sequence[AnyPath | None] | None = None,
    allow_change: bool = False,
    on_step: Callable[[int, int], Any] = lambda done, of: None,
) -> tuple[Profile, ...]:
    """Run models for some steps, and report time and memory by component, node and layer.

    Each model runs first without the profiler, to measure the profiler's cost, then with the profiler and a temporary
    range around every component.

    Args:
        graphs: specs, or built models, which are copied with their edits and weights.
        device: the device; by default the device of the first built model, else the first CUDA device if available,
            else the CPU.
        mode: `train` (zero_grad, forward, loss, backward, AdamW), `prefill` (tokens are read into empty caches, and
            logits are computed for the last token) or `decode` (one token, after `length - 1` tokens in the cache).
        dtype: dtype of weights and activations; by default the dtype of the first built model, or float32.
        compile: compile each entire model. The model is then a single row, and only its kernels are distinguished.
        batch: number of sequences.
        length: tokens of each sequence; by default 128, or `max_len` if that is smaller.
        steps: the number of steps to time, each without the profiler and with the profiler; at least 2.
        warmup: the number of untimed steps before them.
        directory: a folder to write to: `profile.json`, `report.html`, and for each model a trace for TensorBoard
            (torch-tb-profiler) and Perfetto, and scalars. A previous profile is replaced; other contents are an error.
        weights: the file with the weights of a single model, or a list with a file for each model. By default, a model
            has the weights of the folder that its spec was loaded from, or random weights.
        allow_change: as `tfkit.build` takes it.
        on_step: called after each step with the number of completed steps and the total number of steps.

    Returns:
        A profile for each model. Times are seconds, sizes bytes.

    Raises:
        SpecError: the model does not support the mode, such as an encoder in decode; memory is not sufficient; or the
            folder cannot be written.
        ValueError: a count is out of its range.
    """
    models = [as_model(graph, "its modules are run and timed") for graph in graphs]
    default = torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu", dtype=torch.float32)
    like = next((weight for model in models if model.module for weight in model.module.parameters()), default)
    dtype = dtype_of(dtype or like.dtype)
    if isinstance(weights, str | os.PathLike):
        if len(models) > 1:
            raise ValueError("`weights` of several models must be a list")
        weights = [weights]
    files = [None if file is None else Path(file) for file in weights or [None] * len(models)]
    device = device_of(device or like.device)
    if device.type == "meta":
        raise ValueError("the meta device cannot run a model, so there are no times: use `tfkit.cost`")
    settings = [
        Settings(
            device,
            mode,
            dtype,
            compile,
            batch,
            _sequence_length(model.graph, length),
            steps,
            warmup,
            file,
            allow_change,
        )
        for model, file in zip(models, files, strict=True)
    ]
    if directory is not None:
        check_folder(Path(directory))
    names = folders_of([model.graph.name for model in models])
    limits, ticks = limits_of(device, dtype), count(1)
    total = sum(map(count_steps, settings))
    profiles: list[Profile] = []
    with nullcontext() if directory is None else written_folder(Path(directory)) as target:
        for model, setting, name in zip(models, settings, names, strict=True):
            gc.collect()  # the previous model
            profiles.append(
                measure_model(model, setting, limits, _trace_path(target, name), lambda: on_step(next(ticks), total))
            )
        if target is not None:
            write_profiles(profiles, names, target)
    return tuple(profiles)


def _sequence_length(graph: Graph, length: int | None) -> int:
    limit, length = max_len(graph), length_of(graph, length)
    if length is None:
        return min(LENGTH, limit or LENGTH)
    if length == fixed_length(graph):
        return length
    if limit is not None and length > limit:
        raise SpecError(Diagnostic(f"{length} tokens are more than {max_len_text(limit)}"))
    return length


def _trace_path(target: Path | None, name: str) -> Path | None:
    if target is None:
        return None
    (target / name).mkdir()
    return target / name / f"{name}.{TRACE}"


DATA, REPORT = "profile.json", "report.html"
TRACE = "pt.trace.json.gz"
"""Suffix of traces for torch-tb-profiler, which Perfetto and chrome://tracing also open."""


def check_folder(folder: Path) -> None:
    """Raise SpecError if `folder` must not be written: it is a file, or holds more than a profile."""
    if find_spec("tensorboard") is None:
        message = "a log needs `tensorboard`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[profile]"'))
    expected = {DATA, REPORT, *_listed_folders(folder / DATA)}
    if extra := [name for name in names_in(folder) or [] if name not in expected]:
        message = f"{quoted(str(folder))} must hold only the files of a profile; got {listing(extra, 4)}"
        raise SpecError(Diagnostic(message, help="name a new folder"))


def _listed_folders(data: Path) -> list[str]:
    """Return the folders that a previous profile lists."""
    try:
        return [str(entry["folder"]) for entry in read_object(data)["profiles"]]
    except (SpecError, KeyError, TypeError):
        return []


def folders_of(names: Sequence[str]) -> list[str]:
    """Return a folder for each model; a repeated name gets a number."""
    folders: list[str] = []
    for name in names:
        safe = "".join(c if c.isalnum() or c in "-_." else "_" for c in name).lstrip(".") or "model"
        numbered = (f"{safe}_{number}" for number in count(2))
        folders.append(next(name for name in chain([safe], numbered) if name not in folders))
    return folders


def write_profiles(profiles: Sequence[Profile], names: Sequence[str], target: Path) -> None:
    """Write the data, the report, and for each profile the scalars for TensorBoard next to its trace."""
    from tfkit.tools.profile.page import profile_report

    for profile, name in zip(profiles, names, strict=True):
        _write_scalars(profile, target / name)
    documents = [{"folder": name, **to_dict(profile)} for profile, name in zip(profiles, names, strict=True)]
    text = json.dumps({"profiles": documents}, indent=2, ensure_ascii=False)
    (target / DATA).write_text(f"{text}\n", encoding="utf-8")
    (target / REPORT).write_text(profile_report(profiles), encoding="utf-8", errors="replace")


def to_dict(profile: Profile) -> dict[str, Any]:
    """Convert a profile to JSON data, including values derived from its fields."""
    derived = {"step": profile.step, "plain_step": profile.plain_step, "attributed": profile.attributed}
    return asdict(profile) | derived | {"tokens_per_second": profile.tokens / profile.plain_step}


def _write_scalars(profile: Profile, folder: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(folder)) as writer:
        for index, seconds in enumerate(profile.plain_steps):
            writer.add_scalar("step/milliseconds", 1000 * seconds, index)
            writer.add_scalar("step/tokens per second", profile.tokens / seconds, index)
        for index, seconds in enumerate(profile.steps):
            writer.add_scalar("step/milliseconds under the profiler", 1000 * seconds, index)
        for row in summed_rows(profile):
            writer.add_scalar(f"milliseconds/{row.label}", 1000 * row.time, 0)
            writer.add_scalar(f"bytes at the peak/{row.label}", row.at_peak, 0)
        writer.add_scalar("memory/peak", profile.memory.peak, 0)
        writer.add_scalar("memory/before a step", profile.memory.at_start, 0)

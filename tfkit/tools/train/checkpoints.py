"""Checkpoints in a run folder: `step-N` is a model folder that also contains the optimizer and the rest of the state.

`state.json` has digests of the tensor files, of the beginning of `metrics.jsonl`, and of itself. A checkpoint is read
and checked completely before any file of the run is removed. A file that was changed, exchanged or truncated is an
error.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from safetensors.torch import save_file
from torch import Tensor, fx

from tfkit.arguments import name_of
from tfkit.checkpoint.files import TensorFiles, TensorInfo
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.nn.spread import process_of
from tfkit.run.checked_run import WEIGHTS_CONTENT, Run
from tfkit.run.contract import label_of
from tfkit.run.run_facts import read_facts, read_json
from tfkit.run.training.adapters import checkpoint_tensors, weights_file, write_weights
from tfkit.run.training.checkpoint import (
    LOSS,
    SEPARATOR,
    Checkpoint,
    Restored,
    checked_tensors,
    named_for,
    tensors_of_owner,
)
from tfkit.run.training.initial_states import OPTIMIZER_KIND
from tfkit.spec.adapter_files import base_help, read_adapter
from tfkit.spec.folder import ADAPTER_WEIGHTS, LATEST, OPTIMIZER, STATE, TENSORS, checkpoints_in
from tfkit.spec.header import quoted_path
from tfkit.spec.weight_files import combined_digest, content_of, tensor_digests
from tfkit.tools.common.companions import Companions

FORMAT = 1
_LOSS_KIND = re.compile(r"loss(\..+)?\.kind")
MAX_NAMES = 6
"""Maximum number of names that an error lists."""
Count = Annotated[int, Field(ge=0)]


class CheckpointState(BaseModel):
    """The contents of `state.json`."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    format: Literal[1]
    """Version of this format."""
    meaning: str
    """The digest of the run."""
    step: Count
    """Number of steps so far."""
    position: Count
    """Length of `metrics.jsonl` at this step, in bytes."""
    ended: str | None
    """The reason why no step follows; None if one does."""
    skipped: Count
    """Steps without an update."""
    callbacks: list[dict[str, Any]]
    """The state of each callback."""
    model: str
    """Digest of the weights; with adapters, of the weights that they change, too."""
    optimizer: str
    """Digest of the tensors in `optimizer.safetensors`."""
    metrics: str
    """Digest of `metrics.jsonl` up to `position`."""
    tensors: str | None
    """Digest of the tensors in `state.safetensors`, of the loss and of callbacks; None if they have none."""
    digests: dict[Literal["model", "optimizer", "tensors"], dict[str, str]] = {}
    """Digests of the tensors of each file, whose digest is the digest of these. An adapter and checkpoints of earlier
    versions have none."""
    digest: str
    """Digest of all other fields."""


STATES = TypeAdapter(CheckpointState)


def run_companions(run: Run, checkpoint: Path | None) -> Companions:
    """Return the companions of a run's next checkpoint, from its latest checkpoint, or from its weights and its data.

    The data determines the tokenizer, the token that ends a text, the names of the classes, and the processor of
    images; the loss determines the mask token.
    """
    family = run.graph.spec.family
    if checkpoint is not None:
        return Companions.read(checkpoint, family)
    data, weights = run.data, run.config.weights
    companions = Companions.read(run.branch if weights is None else Path(weights.path), family)
    if data.tokenizer is not None:
        companions = companions.with_tokenizer(data.tokenizer)
    mask = None if run.generation is None else run.generation.mask_token
    companions = companions.with_ids(getattr(data, "start", None), getattr(data, "end", None), mask)
    image = next((signal for signal in run.graph.inputs.values() if signal.type == "image"), None)
    scale = getattr(data, "pixel_scale", None)
    if image is not None and scale is not None:
        companions = companions.with_image_processor(image, *scale)
    classes = getattr(data, "classes", None)
    if getattr(data, "n_classes", None) is None and classes is None:
        return companions
    return companions.with_classes(classes)


def write_checkpoint(
    target: Path, checkpoint: Checkpoint, run: Run, *, companions: Companions, position: int, metrics: str
) -> None:
    """Write a checkpoint to an empty folder; `metrics` is the digest of `metrics.jsonl` up to `position`."""
    companions.write(target)
    write_weights(checkpoint.model, target)
    weights = target / weights_file(checkpoint.model)
    save_file(dict(checkpoint.optimizer), target / OPTIMIZER)
    shutil.copymode(weights, target / OPTIMIZER)
    if checkpoint.tensors:
        save_file(dict(checkpoint.tensors), target / TENSORS)
        shutil.copymode(weights, target / TENSORS)
    # Read back from the disk: a file that cannot be read fails here, before an older checkpoint is removed.
    files = {"model": weights, "optimizer": target / OPTIMIZER, "tensors": target / TENSORS}
    files = {key: path for key, path in files.items() if path.exists()}
    digests = {key: tensor_digests(path) for key, path in files.items() if path.name != ADAPTER_WEIGHTS}
    state = {
        "format": FORMAT,
        "meaning": run.digest,
        "step": checkpoint.step,
        "position": position,
        "ended": checkpoint.ended,
        "skipped": checkpoint.skipped,
        "callbacks": checkpoint.callbacks,
        "metrics": metrics,
        "tensors": None,
        **{key: combined_digest(digests[key]) if key in digests else content_of(path) for key, path in files.items()},
        "digests": digests,
    }
    text = json.dumps({**state, "digest": _digest_of(state)})
    (target / STATE).write_text(f"{text}\n", encoding="utf-8")


def _digest_of(state: Mapping[str, Any]) -> str:
    # JSON turns tuples into lists and numeric keys into strings: the digest must be equal before and after.
    text = json.dumps(json.loads(json.dumps(state)), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _further_tensors(folder: Path, state: CheckpointState, process: tuple[int, int]) -> dict[str, Tensor]:
    """Read the tensors of callbacks and of the loss."""
    if state.tensors is None:
        return {}
    with TensorFiles.open(folder / TENSORS) as file:
        return checked_tensors(file, folder / TENSORS, state.tensors, state.digests.get("tensors"), process)


def read_checkpoint(
    folder: Path,
    run: Run,
    model: fx.GraphModule,
    *,
    branch: bool = False,
    earlier: Mapping[str, Sequence[str]] = MappingProxyType({}),
) -> tuple[CheckpointState, Restored]:
    """Read a checkpoint and check its contents. Neither the disk nor the model changes.

    Processes with shards of the model check all tensors together, and each process checks a share of them.
    With `branch`, the checkpoint belongs to a different run, and the states of its callbacks are not read. `earlier`
    maps digests that the run had before changes in place to the names of its callbacks at that time.

    Raises:
        SpecError: a file cannot be read, was changed after the checkpoint was written, or belongs to a different run or
            model.
    """
    state = _read_state(folder, run, branch=branch, earlier=earlier)
    path, process = folder / weights_file(model), process_of(next(model.parameters()))
    with TensorFiles.open(path, compared=True) as opened:
        file = opened.adapters[-1] if opened.adapters else opened
        if opened.adapters and content_of(read_adapter(folder).base) != run.semantics.values[WEIGHTS_CONTENT]:
            message = (
                f"the adapter in {quoted_path(folder)} must change the `weights` of the run; got a different model"
            )
            raise SpecError(Diagnostic(message, help=base_help(folder)))
        _check_names(path, _tensor_descriptions(checkpoint_tensors(model)), _tensor_descriptions(file.names))
        weights = checked_tensors(file, path, state.model, state.digests.get("model"), process)
    with TensorFiles.open(folder / OPTIMIZER) as file:
        names = {name for name, _ in model.named_parameters()}
        _check_parameters(folder / OPTIMIZER, names, file.names)
        optimizer = checked_tensors(file, folder / OPTIMIZER, state.optimizer, state.digests.get("optimizer"), process)
    tensors = _further_tensors(folder, state, process)
    if branch:
        tensors = named_for(LOSS, tensors_of_owner(tensors, LOSS))
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        optimizer = {name: tensor for name, tensor in optimizer.items() if name.partition(SEPARATOR)[0] in trained}
        return state, Restored(state.step, weights, optimizer, (), None, tensors=tensors, branch=True)
    states, ended = tuple[Mapping[str, Any] | None, ...](state.callbacks), state.ended
    if state.meaning != run.digest:
        numbers = _previous_indices(earlier[state.meaning], [label_of(config) for config in run.config.callbacks])
        states, ended = tuple(None if old is None else state.callbacks[old] for old in numbers), None
        callbacks = {new: tensors_of_owner(tensors, old) for new, old in enumerate(numbers) if old is not None}
        tensors = named_for(LOSS, tensors_of_owner(tensors, LOSS))
        for new, named in callbacks.items():
            tensors |= named_for(new, named)
    return state, Restored(state.step, weights, optimizer, states, ended, state.skipped, tensors)


def _previous_indices(before: Sequence[str], labels: Sequence[str]) -> list[int | None]:
    """Return for each callback the previous index of a callback of its name; None if it begins without a state."""
    free, numbers = dict(enumerate(before)), list[int | None]()
    for label in labels:
        numbers.append(next((number for number, old in free.items() if old == label), None))
        free = {number: old for number, old in free.items() if number != numbers[-1]}
    return numbers


def read_branch(run: Run, model: fx.GraphModule) -> Restored:
    """Read the checkpoint that a run branches from; raise SpecError if the run cannot continue it."""
    assert run.branch is not None
    try:
        facts = read_facts(run.branch.parent)
        kinds = {path: value for path, value in run.semantics.values.items() if OPTIMIZER_KIND.fullmatch(path)}
        before = {path: value for path, value in facts.meaning.items() if path in kinds} if facts else kinds
        if before != kinds:
            message = f"it has the optimizer {', '.join(map(str, before.values()))}"
            raise SpecError(Diagnostic(message, help="use the optimizer of the run, whose state the branch continues"))
        restored = read_checkpoint(run.branch, run, model, branch=True)[1]
        loss = {path: value for path, value in run.semantics.values.items() if _LOSS_KIND.fullmatch(path)}
        if facts and any(facts.meaning.get(path) != value for path, value in loss.items()):
            return replace(restored, tensors={})  # the state of a different loss
        return restored
    except SpecError as error:
        first = error.diagnostics[0]
        message = f"cannot branch from {quoted_path(run.branch)}: {first.message}"
        path = ("branch",)
        raise SpecError(Diagnostic(message, run.file.location(path), *path, first.notes, first.help)) from error


def resume_error(folder: Path, error: SpecError) -> SpecError:
    """Build the error of a checkpoint that cannot be used, from the first of its errors."""
    older = [path.name for path in reversed(checkpoints_in(folder.parent)) if path != folder][:MAX_NAMES]
    first = error.diagnostics[0]
    message = f"cannot resume from the checkpoint {quoted_path(folder)}: {first.message}"
    help = "train in a new folder: -o DIR"
    if first.help is not None and first.help == base_help(folder):
        help = first.help  # earlier checkpoints change the same weights
    elif older:
        help = f"write the name of an earlier checkpoint to {quoted_path(folder.parent / LATEST)}: {', '.join(older)}"
    return SpecError(Diagnostic(message, notes=first.notes, help=help))


def _read_state(folder: Path, run: Run, *, branch: bool, earlier: Mapping[str, Sequence[str]]) -> CheckpointState:
    path = folder / STATE
    state = read_json(path, STATES)
    message = None
    if _digest_of(state.model_dump(exclude={"digest"}, exclude_unset=True)) != state.digest:
        message = f"{quoted_path(path)} was changed after it was written"
    elif not branch and state.meaning not in {run.digest, *earlier}:
        message = f"it belongs to a different run, {state.meaning}; this run is {run.digest}"
    elif folder.name != f"step-{state.step}":
        message = f"{quoted_path(path)} belongs to step {state.step}"
    elif state.step > run.steps:
        message = f"it has {state.step:,} steps, but the run has {run.steps:,}"
    elif not branch and len(state.callbacks) != (n := len(earlier.get(state.meaning, run.config.callbacks))):
        message = f"it has {len(state.callbacks)} callbacks, but the run has {n}"
    if message is not None:
        raise SpecError(Diagnostic(message))
    return state


def _tensor_descriptions(tensors: Mapping[str, Tensor | TensorInfo]) -> dict[str, str]:
    """Describe each tensor by its dtype and shape."""
    return {name: f"{name_of(tensor.dtype)} {list(tensor.shape)}" for name, tensor in tensors.items()}


def _check_names(path: Path, expected: Mapping[str, str], actual: Mapping[str, str]) -> None:
    """Raise SpecError unless the tensors of a file have the names, dtypes and shapes of a model."""
    names = [name for name in {**expected, **actual} if expected.get(name) != actual.get(name)]
    if names:
        texts = [(name, actual.get(name, "missing"), expected.get(name, "missing")) for name in names]
        notes = [f"{name}: {in_file} in the file, {in_model} in the model" for name, in_file, in_model in texts]
        more = [f"and {len(notes) - MAX_NAMES:,} more"] if len(notes) > MAX_NAMES else []
        message = f"{quoted_path(path)} must have the tensors of the model"
        raise SpecError(Diagnostic(message, notes=(*notes[:MAX_NAMES], *more)))


def _check_parameters(path: Path, names: set[str], actual: Iterable[str]) -> None:
    """Raise SpecError if the optimizer's state contains tensors for parameters that the model lacks."""
    unknown = [name for name in actual if name.partition(SEPARATOR)[0] not in names]
    if unknown:
        raise SpecError(
            Diagnostic(f"the model has no parameter for the tensor {quoted(unknown[0])} of {quoted_path(path)}")
        )

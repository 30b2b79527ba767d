"""The files of a checkpoint, read without trust and without torch: their headers, and a digest of their tensors."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from fnmatch import fnmatchcase
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, closest_name, listing, quoted
from tfkit.spec.adapter_files import BASE, base_help, read_adapter
from tfkit.spec.folder import ADAPTER_WEIGHTS, INDEX, RUN, STATE, STEP, WEIGHTS, model_folder
from tfkit.spec.header import (
    AGAIN,
    PICKLES,
    PUBLISHED_PICKLES,
    Entry,
    FileHeader,
    Malformed,
    Stamp,
    how_to_convert,
    open_regular,
    quoted_path,
    read_error,
    read_header,
    read_object,
)

CHUNK = 2**20
MOMENT = 2 * 10**9
"""Nanoseconds in which a file can be written twice with equal modification times, on any file system."""
_cache: dict[Stamp, dict[str, str]] = {}
"""The digests of tensors by the stamp of their file."""


def read_headers(path: Path, *, within: tuple[Path, ...] = ()) -> dict[Path, FileHeader]:
    """Read and check the headers of a checkpoint: one file, a folder with weights, or an index with its shards.

    The headers of an adapter follow the headers of the weights that it changes; `within` are the adapters around them.

    Raises:
        SpecError: a file is missing, unreadable, damaged, a pickle or of another foreign format; or the index names
            files outside its folder, or tensors that its files do not have; or two files have the same tensor.
    """
    path = _in_folder(path) if os.path.isdir(path) else path
    if path.name == ADAPTER_WEIGHTS:
        settings, real = read_adapter(path.parent), Path(os.path.realpath(path))
        if real in within:
            message = f"the adapter in {quoted_path(path.parent)} must change the weights of a model; got itself"
            raise SpecError(Diagnostic(message, help=f"correct `{BASE}` of the adapter"))
        return {**read_headers(settings.base, within=(*within, real)), path: read_header(path)}
    if not path.name.endswith(".index.json"):
        return {path: read_header(path)}
    headers: dict[Path, FileHeader] = {}
    locations: dict[str, Path] = {}
    shards = {shard_path(path, shard): names for shard, names in names_by_shard(path).items()}
    if missing := [file.name for file in shards if not os.path.lexists(file)]:
        message = f"{quoted_path(path)} names {quoted(missing[0])}, which is not in its folder"
        more = (f"missing files: {len(missing):,} of {len(shards):,}",)
        raise SpecError(Diagnostic(message, notes=more, help="fetch the missing files of the checkpoint"))
    for file, names in shards.items():
        headers[file] = headers.get(file) or read_header(file)
        _check_listed(path, file, names, headers[file])
    for file, header in headers.items():
        for name in header.tensors:
            if name in locations:
                message = (
                    f"tensor {quoted(name)} is in two files: {quoted_path(locations[name])} and {quoted_path(file)}"
                )
                raise SpecError(Diagnostic(message))
            locations[name] = file
    return headers


def content_of(path: Path) -> str:
    """Return a digest of the tensors, 64 hexadecimal digits. It does not depend on how they are split into files.

    It is the digest of the digests of the tensors, so that a file with some of the tensors can be checked alone. The
    digest of an adapter includes the weights that it changes, and the settings that determine the merged weights.
    `path` is a file, an index, a model folder, or a run folder, whose latest checkpoint is used.
    Metadata is ignored. Raises SpecError as `read_headers` does.
    """
    digests: dict[str, str] = {}
    adapters = []
    for file, header in read_headers(model_folder(path)).items():
        if file.name == ADAPTER_WEIGHTS:
            adapters.append([read_adapter(file.parent).content, _tensor_digests(file, header)])
        else:
            digests |= _tensor_digests(file, header)
    return combined_digest([digests, *adapters] if adapters else digests)


def combined_digest(content: Mapping[str, str] | Sequence[object]) -> str:
    """Return the digest of tensors from the digest of each, as `content_of` does for a file without an adapter."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def tensor_digests(path: Path, names: Collection[str] | None = None) -> dict[str, str]:
    """Return the digests of some tensors of a file, by default of all. Raise SpecError as `read_headers` does."""
    header = read_header(path)
    if names is None or header.stamp in _cache:
        digests = _tensor_digests(path, header)
        return {name: digests[name] for name in (digests if names is None else names)}
    return {name: _tensor_digest(path, name, header.tensors[name]) for name in names}


def changed_weights(path: Path) -> Diagnostic | None:
    """Describe how weights differ from the weights that a run wrote; None if they do not, or if no run wrote them.

    `path` is as for `content_of`. Raises SpecError as `read_headers` does.
    """
    for file in read_headers(model_folder(path)):
        if (problem := _problem_of(file)) is not None:
            return problem
    return None


def _problem_of(file: Path) -> Diagnostic | None:
    """Compare the tensors of a file with the digest that the run wrote next to it."""
    folder, state = file.parent, file.parent / STATE
    in_run = STEP.fullmatch(folder.name) is not None and os.path.isfile(folder.parent / RUN)
    if file.name not in (WEIGHTS, ADAPTER_WEIGHTS) or not (in_run or os.path.lexists(state)):
        return None
    try:
        digest = read_object(state, max_values=None).get("model")
    except SpecError as error:
        cause = error.diagnostics[0].message
    else:
        if content_of(file) == digest:
            return None
        cause = f"{quoted_path(state)} has a different digest"
    message, help = f"the tensors in {quoted_path(file)} are not the tensors that the run wrote", None
    if file.name == ADAPTER_WEIGHTS:
        message, help = f"{message}, or the model that they change is not the model of the run", base_help(folder)
    return Diagnostic(message, notes=(cause,), help=help)


def _tensor_digests(file: Path, header: FileHeader) -> dict[str, str]:
    """Return the digest of each tensor of a file. A file is read once, unless it was changed a moment ago."""
    if (digests := _cache.get(header.stamp)) is not None:
        return digests
    begin, digests = time.time_ns(), {}
    for name, entry in header.tensors.items():
        digests[name] = _tensor_digest(file, name, entry)
    if header.stamp.written < begin - MOMENT:
        _cache[header.stamp] = digests
    return digests


def _tensor_digest(file: Path, name: str, entry: Entry) -> str:
    digest = hashlib.sha256(json.dumps([name, entry.dtype, list(entry.shape)]).encode())
    for chunk in _tensor_bytes(file, entry):
        digest.update(chunk)
    return digest.hexdigest()


def _tensor_bytes(path: Path, entry: Entry) -> Iterator[bytes]:
    """Yield the bytes of a tensor in chunks."""
    with open_regular(path) as file:
        try:
            file.seek(entry.start)
            for start in range(entry.start, entry.end, CHUNK):
                size = min(CHUNK, entry.end - start)
                chunk = file.read(size)
                if len(chunk) < size:
                    raise SpecError(Diagnostic(f"{quoted_path(path)} was truncated while it was read"))
                yield chunk
        except OSError as error:
            raise read_error(path, error) from error


def _in_folder(folder: Path) -> Path:
    """Return the weights of a folder: a safetensors file, an index, or the matrices of an adapter."""
    for name in (WEIGHTS, INDEX, ADAPTER_WEIGHTS):
        if os.path.lexists(folder / name):
            return folder / name
    try:
        names = sorted(path.name for path in folder.iterdir())
    except OSError as error:
        raise read_error(folder, error) from error
    weights = [name for name in names if name.endswith((".safetensors", ".safetensors.index.json"))]
    pickles = [name for name in names if name.lower().removesuffix(".index.json").endswith(PICKLES)]
    if pickles and not weights:
        message = f"{quoted_path(folder)} has only pickles, which can run any code when they are loaded"
        published = published_pickles(folder)
        help = how_to_convert(published[0]) if published else "fetch the safetensors files of the same model"
        raise SpecError(Diagnostic(message, notes=(f"it has {listing(map(quoted, pickles))}",), help=help))
    raise SpecError(
        Diagnostic(
            f"{quoted_path(folder)} has neither `{WEIGHTS}` nor `{INDEX}`",
            notes=(f"it has {listing(map(quoted, names))}" if names else "it is empty",),
            help=f"name the file: {listing(str(folder / name) for name in weights)}" if weights else None,
        )
    )


def published_pickles(folder: Path) -> list[Path]:
    """Return the pickles in a folder that `tfkit convert` converts; empty if the folder cannot be read."""
    with suppress(OSError):
        names = sorted(os.listdir(folder))
        return [folder / name for name in names if any(fnmatchcase(name, pattern) for pattern in PUBLISHED_PICKLES)]
    return []


def names_by_shard(index: Path) -> dict[str, list[str]]:
    """Return the files that an index names, each with the names of its tensors."""
    files = read_object(index, help=AGAIN).get("weight_map")
    try:
        if not isinstance(files, dict) or not files:
            raise Malformed("it has no `weight_map` from the names of tensors to files")
        shards: dict[str, list[str]] = {}
        for name, shard in files.items():
            if not isinstance(shard, str) or not shard:
                raise Malformed(f"its `weight_map` has no file for tensor {quoted(name)}")
            shards.setdefault(shard, []).append(name)
    except Malformed as error:
        raise SpecError(Diagnostic(f"cannot read {quoted_path(index)}: {error}", help=AGAIN)) from error
    return shards


def shard_path(index: Path, shard: str) -> Path:
    """Return the path of a shard. Raise an error if it lies outside the folder of the index, even through a link.

    Links to the blobs of the same repository are allowed: the cache of the Hugging Face hub consists of such links.
    """
    folder = index.parent
    allowed = [folder]
    if folder.absolute().parent.name == "snapshots":
        allowed.append(folder.absolute().parent.parent / "blobs")
    if "\0" not in shard:  # a name with a zero byte is valid nowhere: opening the file fails
        real = Path(os.path.realpath(folder / shard))
        if not any(real.is_relative_to(os.path.realpath(parent)) for parent in allowed):
            message = f"{quoted_path(index)} names a file outside its folder: {quoted(shard)}"
            raise SpecError(Diagnostic(message, help="put the files of a checkpoint next to their index"))
    return folder / shard


def _check_listed(index: Path, file: Path, names: Iterable[str], header: FileHeader) -> None:
    missing = [name for name in names if name not in header.tensors]
    if missing:
        near = closest_name(missing[0], header.tensors)
        message = (
            f"{quoted_path(index)} assigns tensor {quoted(missing[0])} to {quoted(file.name)}, which does not have it"
        )
        more = (f"and {len(missing) - 1:,} more",) if missing[1:] else ()
        raise SpecError(
            Diagnostic(
                message, notes=more, help=f"a tensor with a similar name exists: {quoted(near)}" if near else None
            )
        )

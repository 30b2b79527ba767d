"""Weights in other layouts, converted to a published folder: safetensors and a config.json.

This is the only code of tfkit that reads pickles, in a process without network that cannot import tfkit.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tfkit.arguments import name_of
from tfkit.checkpoint.files import TensorFiles
from tfkit.checkpoint.weight_map import write_tensors
from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.folder import CONFIG, MAX_CONFIG
from tfkit.spec.header import PICKLES, open_regular, quoted_path, read_error, read_object
from tfkit.spec.source import plain_data, read
from tfkit.spec.weight_files import names_by_shard, shard_path
from tfkit.tools.common.atomic_files import names_in, written_folder
from tfkit.tools.common.companions import Companions
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.convert.layouts import LAYOUTS, Conversion, StoredTensors

PUBLISHED_INDEX = "pytorch_model.bin.index.json"
LAYOUT_OF = {
    "pytorch_model.bin": "transformers",
    "pytorch_model-*.bin": "transformers",
    "lit_model.pth": "litgpt",
    "consolidated.*.pth": "Meta",
}
"""The layouts of files that belong to a folder, by patterns of their names."""
SETTINGS = {"litgpt": "model_config.yaml", "Meta": "params.json"}
"""The files next to the weights with the settings of the model."""


def convert(source: Path, folder: Path) -> tuple[str, list[Path], list[Diagnostic]]:
    """Convert weights to a new published folder. Return the name of their layout, the files, and warnings.

    Args:
        source: a folder, or a file with a pickle.
        folder: the folder to write, which must be empty or missing. It is compared with the source before it is moved
            to its final name.

    Raises:
        SpecError: the source has no weights in a known layout, or is damaged, or contains anything but tensors and
            plain values; or the settings next to it describe a model that no class of transformers has.
    """
    if names_in(folder):
        raise SpecError(Diagnostic(f"{quoted(str(folder))} must be a new folder; got a folder with files"))
    layout, pickles = _pickles_of(source)
    around = source if os.path.isdir(source) else source.parent
    companions = Companions.read(around, None).files if layout != "tensors" else {}
    with written_folder(folder) as target, ExitStack() as stack:
        raw = target / "raw"
        raw.mkdir()
        settings = _read_pickles(pickles, raw)
        files = [stack.enter_context(TensorFiles.open(raw / f"{number}.safetensors")) for number in range(len(pickles))]
        layout = "nanoGPT" if layout == "tensors" and settings else layout
        conversion = _conversion(layout, StoredTensors(files), settings, around)
        _write(conversion, target)
        if layout == "transformers" and os.path.lexists(around / CONFIG):
            read_object(around / CONFIG, max_bytes=MAX_CONFIG)
            with open_regular(around / CONFIG) as config:
                (target / CONFIG).write_bytes(config.read(MAX_CONFIG))
        for name, content in companions.items():
            (target / name).parent.mkdir(exist_ok=True)
            (target / name).write_bytes(content)
        stack.close()
        shutil.rmtree(raw)
    return layout, sorted(folder.iterdir(), reverse=True), conversion.notes


def _pickles_of(source: Path) -> tuple[str, list[Path]]:
    """Return the layout and the pickles of a source."""
    if not os.path.isdir(source):
        with open_regular(source):  # raises the error of a missing or unreadable file
            pass
        in_folder = any(fnmatchcase(source.name, pattern) for pattern in LAYOUT_OF)
        return _pickles_of(source.parent) if in_folder else ("tensors", [source])
    try:
        names = sorted(os.listdir(source))
    except OSError as error:
        raise read_error(source, error) from error
    if PUBLISHED_INDEX in names:
        return "transformers", [
            shard_path(source / PUBLISHED_INDEX, name) for name in names_by_shard(source / PUBLISHED_INDEX)
        ]
    for pattern, layout in {**LAYOUT_OF, "ckpt.pt": "tensors"}.items():
        if matches := [source / name for name in names if fnmatchcase(name, pattern)]:
            return layout, matches
    pickles = [name for name in names if name.endswith(PICKLES)]
    help = f"name the file: `tfkit convert {source / pickles[0]} -o DIR`" if pickles else None
    message = f"{quoted_path(source)} has no weights of transformers, Meta, litgpt or nanoGPT"
    raise SpecError(Diagnostic(message, help=help))


def _read_pickles(pickles: Sequence[Path], folder: Path) -> dict[str, Any]:
    """Write the tensors of each pickle to a file in a folder, in a separate process; return the settings in them."""
    settings: dict[str, Any] = {}
    with Isolated(str(Path(__file__).with_name("read_pickle.py"))) as process:
        for number, pickle in enumerate(pickles):
            with open_regular(pickle):  # raises the error of a missing or unreadable file
                pass
            answer = process.answer([os.path.abspath(pickle), str(folder.absolute() / f"{number}.safetensors")])
            problem = answer.get("error") if isinstance(answer, dict) else answer
            if problem is not None:
                message = f"{quoted_path(pickle)} cannot be read as tensors: {problem}"
                raise SpecError(
                    Diagnostic(message, help="fetch it again, or take the safetensors files of the same model")
                )
            settings |= answer["settings"]
    return settings


def _conversion(layout: str, stored: StoredTensors, settings: Mapping[str, Any], folder: Path) -> Conversion:
    if layout in LAYOUTS:
        return LAYOUTS[layout](stored, plain_data(read(folder / SETTINGS[layout])) if layout in SETTINGS else settings)
    names = [name for file in stored.files for name in file.names]
    if duplicates := [name for name in stored.names if names.count(name) > 1]:
        raise SpecError(Diagnostic(f"tensor {quoted(duplicates[0])} is in two files of {quoted_path(folder)}"))
    conversion = Conversion(stored)
    for name in stored.names:
        conversion.put(name, name)
    if layout == "transformers" and os.path.lexists(folder / PUBLISHED_INDEX):
        listed = [name for names in names_by_shard(folder / PUBLISHED_INDEX).values() for name in names]
        if missing := [name for name in listed if name not in stored.names]:
            message = f"{quoted_path(folder / PUBLISHED_INDEX)} names tensor {quoted(missing[0])}, which no file has"
            raise SpecError(Diagnostic(message, help="fetch the files of the checkpoint again"))
    return conversion


def _write(conversion: Conversion, target: Path) -> None:
    """Write the tensors and the config.json of a model, and compare the written tensors with the source."""
    kinds: set[str] = set()

    def sizes() -> Any:
        for name, tensor in conversion.tensors():
            kinds.add(name_of(tensor.dtype))
            yield name, tensor.nbytes

    write_tensors(sizes(), conversion.tensors(), target, metadata={"format": "pt"})
    if conversion.config_json is not None:
        fields = {**conversion.config_json, **({"dtype": kinds.copy().pop()} if len(kinds) == 1 else {})}
        (target / CONFIG).write_text(f"{json.dumps(fields, indent=2)}\n", encoding="utf-8")
    with TensorFiles.open(target) as written:
        for name, tensor in conversion.tensors():
            if not _same_bits(written.read(name), tensor):
                raise SpecError(
                    Diagnostic(f"tensor {quoted(name)} was not written as it was read", help="check the disk")
                )


def _same_bits(written: Tensor, tensor: Tensor) -> bool:
    same = written.dtype == tensor.dtype and written.shape == tensor.shape
    return same and torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (written, tensor)))

"""Files that are not safetensors, recognized by their first bytes or their names, with advice about each."""

from __future__ import annotations

from pathlib import Path

from tfkit.errors import Diagnostic, SpecError

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
HOW_TO_CONVERT = (
    "write its tensors to a safetensors file: `AutoModel.from_pretrained(OLD).save_pretrained(NEW)` in transformers, "
    "or `safetensors.torch.save_file(torch.load(FILE, weights_only=True), 'model.safetensors')`"
)
_PICKLE = ("is a pickle, which can run any code when it is read", HOW_TO_CONVERT)
_GGUF = (
    "is a GGUF file, made for llama.cpp",
    "take the safetensors files of the same model; `AutoModel.from_pretrained(DIR, gguf_file=FILE)` in transformers "
    "reads some and can save them",
)
_KERAS = ("is an HDF5 file, made for Keras", "take the safetensors files of the same model")
_NUMPY = ("is a NumPy array", "`safetensors.numpy.save_file({'name': array}, FILE)` makes a safetensors file of it")
_PACKED = ("is compressed", "unpack it first")
_POINTER = ("is a pointer of Git LFS, not the file", "`git lfs pull` in its repository fetches the file")
_PAGE = ("is a web page", "the download failed: fetch the file again")
_JSON = ("is a JSON text", "give the weights themselves, their folder, or their index (`*.index.json`)")

_STARTS = {
    b"PK\x03\x04": _PICKLE,  # torch.save writes a zip archive with a pickle in it
    b"\x80\x02": _PICKLE,
    b"\x80\x03": _PICKLE,
    b"\x80\x04": _PICKLE,
    b"\x80\x05": _PICKLE,
    b"GGUF": _GGUF,
    b"lmgg": _GGUF,
    b"tjgg": _GGUF,
    b"\x89HDF": _KERAS,
    b"\x93NUMPY": _NUMPY,
    b"\x1f\x8b": _PACKED,
    b"\x28\xb5\x2f\xfd": _PACKED,
    b"version ": _POINTER,
    b"<!": _PAGE,
    b"<html": _PAGE,
    b"{": _JSON,
}


def refuse_foreign(path: Path, shown: str, start: bytes) -> None:
    """Raise SpecError if a file is known to be of another format than safetensors.

    Args:
        path: its path; the name of a pickle is refused whatever the file begins with.
        shown: the path as the error names it.
        start: its first eight bytes, if they cannot be the length of a header: 640 begins as a pickle does.
    """
    match = next((kind for prefix, kind in _STARTS.items() if start.startswith(prefix)), None)
    suffix = path.suffix.lower()
    if match is None and suffix in PICKLES:
        match = (f"has the name of a pickle (`{suffix}`), which can run any code when it is read", HOW_TO_CONVERT)
    if match is not None:
        raise SpecError(Diagnostic(f"{shown} {match[0]}", help=match[1]))

"""Models on the Hugging Face Hub, by name: `org/model` instead of a path."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted

NAME = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""Matches the name of a model: its owner and its repository."""
FILES = (".safetensors", ".json", ".yaml", ".yml", ".pt", ".bin", ".gguf", ".py")
"""Suffixes of files. A missing path with such a suffix is never looked up on the Hub."""
WEIGHTS = ("*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "spec.yaml")
"""Patterns of the files of a model that tfkit downloads. They never match code."""


def local_path(path: Path, patterns: Sequence[str] = WEIGHTS) -> Path:
    """Return the path. If it is the name of a model on the Hub, return the folder with its downloaded files instead.

    Raise SpecError if the Hub has no such model, or cannot be reached.
    """
    name = path.as_posix()
    if os.path.exists(path) or not NAME.fullmatch(name) or path.suffix in FILES:
        return path
    if importlib.util.find_spec("huggingface_hub") is None:
        message = f"there is no folder {quoted(name)}, and models on the Hub need `huggingface_hub`, which is missing"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[transformers]"'))
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except Exception as error:  # errors of the network, the Hub and its cache have no common class
        cause = " ".join(str(error).split())[:200] or type(error).__name__
        message = f"there is no folder {quoted(name)}, and the Hub does not provide a model of this name: {cause}"
        raise SpecError(Diagnostic(message, help=f"download it first: `hf download {name} --local-dir DIR`")) from error

"""The digest of the tensors in files."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tfkit.spec import weight_files
from tfkit.spec.weight_files import content_of


def test_a_digest_does_not_depend_on_the_chunks_in_which_a_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors shorter than a chunk, of a number of chunks, and of a chunk and a half."""
    save_file({"a": torch.arange(10.0), "b": torch.arange(8.0), "c": torch.arange(3.0)}, tmp_path / "w.safetensors")
    digests = set()
    for size in (2**20, 32, 24, 16, 4):
        monkeypatch.setattr(weight_files, "CHUNK", size)
        monkeypatch.setattr(weight_files, "_cache", {})
        digests.add(content_of(tmp_path / "w.safetensors"))
    assert len(digests) == 1

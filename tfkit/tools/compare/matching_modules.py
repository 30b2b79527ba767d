"""The corresponding modules of two implementations, derived from the tensors that they hold."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from tfkit.checkpoint.names import above
from tfkit.checkpoint.weights import Link


def matching_modules(model: nn.Module, links: tuple[Link, ...], theirs: Mapping[str, bool]) -> dict[str, str]:
    """Return the paths of another model's modules by the matching paths of ours.

    Modules match if they hold the same tensors, by `links`. `theirs` has all paths of the other model; True for a
    single module.
    """
    held: dict[str, set[str]] = {}
    owners: dict[str, set[str]] = {}
    for link in links:
        files = {name.rpartition(".")[0] for name in link.file}
        for path in {path for name in link.model for path in above(name)}:
            held.setdefault(path, set()).update(files)
        for name in link.file:
            for path in above(name):
                owners.setdefault(path, set()).add(name.rpartition(".")[0])
    matches: dict[str, str] = {}
    for path, _ in model.named_modules():
        files_inside = held.get(path, set())
        common = _common(files_inside)
        # Of ours with equal tensors, the outermost matches a container there, the innermost a single module.
        if (
            files_inside
            and common in theirs
            and owners.get(common) == files_inside
            and (theirs[common] or common not in matches)
        ):
            matches[common] = path
    return {path: common for common, path in matches.items()}


def _common(paths: set[str]) -> str:
    """Return the deepest module that holds all of these."""
    split = [path.split(".") for path in paths]
    parts = []
    for words in zip(*split, strict=False):
        if len(set(words)) > 1:
            break
        parts.append(words[0])
    return ".".join(parts)

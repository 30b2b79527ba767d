"""The differences between two scenes, box by box."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tfkit.tools.draw.boxes import COUNT, MISSING
from tfkit.tools.draw.scene import Chain, Mark, Scene, Tower
from tfkit.tools.draw.shapes import Differences

Said = Mapping[str, object]


def differences(a: Scene, b: Scene) -> tuple[Differences, Differences]:
    """Return, for each of two scenes, the keys of differing notes by the key of their box."""
    left, right = dict(_contents(a)), dict(_contents(b))
    return _against(left, right), _against(right, left)


def _against(contents: Mapping[str, Said], other: Mapping[str, Said]) -> Differences:
    differences = {}
    for key, content in contents.items():
        there = other.get(key)
        if there is None:
            differences[key] = frozenset([MISSING])
        elif differing := {name for name in content.keys() | there.keys() if content.get(name) != there.get(name)}:
            differences[key] = frozenset(differing)
    return differences


def _contents(scene: Scene) -> Iterator[tuple[str, Said]]:
    """Yield the contents of each box, frame and mark, by its key."""
    yield "", {"total": scene.total} | {note.key: note.text for note in scene.facts}
    for box in scene.boxes():
        notes = {note.key: note.text for note in box.notes} | {chip.key: chip.text for chip in box.chips}
        yield box.key, {"title": box.title, "tied": box.tied, COUNT: box.parameters, **notes}
    for node in scene.nodes.values():
        if isinstance(node, Tower):
            yield node.key, {note.key: note.text for note in node.notes} | {"total": node.parameters}
            for layer in node.layers:
                yield layer.key, {"times": layer.times}
        yield from _marks(node)


def _marks(node: Chain | Tower) -> Iterator[tuple[str, Said]]:
    if isinstance(node, Chain):
        items = list(node.items)
    else:
        branches = [branch for layer in node.layers for part in layer.segments for branch in part.branches]
        items = [item for branch in branches for item in branch]
    yield from ((item.key, {"text": item.text}) for item in items if isinstance(item, Mark))

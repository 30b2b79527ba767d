"""The table by component, which opens down to layers and modules, and two models side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from xml.etree.ElementTree import Element

from tfkit.tools.common.pages import Child, remark, tag
from tfkit.tools.profile.report.bars import (
    amount_text,
    by_model,
    memory_text,
    share_text,
    side_by_side,
    swatch,
    time_text,
)
from tfkit.tools.profile.report.time import REST, UPDATE
from tfkit.tools.profile.result import ComponentTime, Profile, labels_of, rows

COLUMNS = ("component", "time", "share", "forward", "backward", "FLOPs", "FLOP/s", "bytes/s", "at the peak")


def component_tables(profiles: Sequence[Profile]) -> list[Child]:
    """Return a comparison of two models, if there are two, and for each model a table whose rows open."""
    compared: list[Child] = [_comparison(profiles)] if len(profiles) > 1 else []
    words = "All times are those of a step under the profiler, which is slower than one without it."
    return [*compared, *by_model(profiles, _tree), remark(f"{words} A row opens to its layers and modules.")]


def _tree(profile: Profile) -> list[Child]:
    tree = tag("div", tag("div", *(tag("span", name) for name in COLUMNS), class_="row head"), class_="tree")
    tree.extend(_branch(profile, row) for row in rows(profile))
    rest = (REST, time_text(profile.unattributed), share_text(profile.unattributed, profile.step))
    tree.append(_row("rest", *rest, *[""] * 6))
    tree.append(_total(profile))
    return [tag("div", tree, class_="scroll")]


def _branch(profile: Profile, row: ComponentTime) -> Element:
    """Build the row of a component, with its layers below it and the modules of each; a leaf if there are none."""
    component = replace(profile, parts=tuple(part for part in profile.parts if part.component == row.component))
    layers = [_layer(component, layer) for layer in rows(component, "layer")]
    alone = len(component.parts) == 1 and component.parts[0].path == row.path
    return _line(profile, row, row.label, [] if alone else layers, name=row.component)


def _layer(profile: Profile, row: ComponentTime) -> Element:
    parts = [part for part in profile.parts if part.layer == row.layer]
    if len(parts) == 1:
        return _line(profile, parts[0], parts[0].path, [])
    return _line(profile, row, row.path, [_line(profile, part, part.path, []) for part in parts])


def _line(profile: Profile, part: ComponentTime, label: str, inside: Sequence[Element], name: str = "") -> Element:
    """Build a row that opens to the rows inside it."""
    backward = time_text(part.backward) if part.backward else ""
    cells = (
        label,
        time_text(part.time),
        share_text(part.time, profile.step),
        time_text(part.forward) if part.component not in UPDATE else "",
        backward,
        amount_text(part.flops, ""),
        amount_text(part.flops_per_second, ""),
        amount_text(part.bytes_per_second, "B"),
        memory_text(part.at_peak) if part.at_peak else "",
    )
    row = _row(name, *cells, share=part.time / profile.step)
    return tag("details", tag("summary", row), *inside) if inside else row


def _row(name: str, *cells: str, share: float = 0.0) -> Element:
    """Build a row; a component has its colour before it, and a bar for its share of the step."""
    children = [tag("span", cell) for cell in cells]
    if name:
        children[0] = tag("span", swatch(name), cells[0])
        children[2].append(
            tag("i", class_=f"meter c-{'rest' if name == 'rest' else 'share'}", style=f"width:{100 * share:.1f}%")
        )
    return tag("div", *children, class_="row")


def _total(profile: Profile) -> Element:
    components = rows(profile)
    forward = sum(row.forward for row in components if row.component not in UPDATE)
    backward = sum(row.backward for row in components)
    flops = sum(row.flops or 0 for row in components) or None
    rate = flops / profile.step if flops else None
    held = sum(row.at_peak for row in components)
    times = (time_text(profile.step), share_text(1, 1), time_text(forward), time_text(backward) if backward else "")
    rates = (amount_text(flops, ""), amount_text(rate, ""), "", memory_text(held or None))
    return tag("div", *(tag("span", cell) for cell in ("step", *times, *rates)), class_="row total")


def _comparison(profiles: Sequence[Profile]) -> Element:
    """Tabulate the time by component of each profile, and its ratio to the first."""
    of = [{row.component: row.time for row in rows(profile)} for profile in profiles]
    lines: list[tuple[Child, list[float | None]]] = [
        (tag("span", swatch(name), label), [times.get(name) for times in of])
        for name, label in labels_of(profiles).items()
    ]
    lines.append((tag("span", swatch("rest"), REST), [profile.unattributed for profile in profiles]))
    lines.append(("step", [profile.step for profile in profiles]))
    return side_by_side(
        "component", profiles, ((name, [(time_text(time), time) for time in times]) for name, times in lines)
    )

"""The report of a profile: one HTML file with all pictures in it, which opens without a network."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import pstdev
from typing import NamedTuple
from xml.etree.ElementTree import Element

import torch

from tfkit.tools.common.pages import PageContent, PageSection, bullets, page_table, remark, report_page, tag, terms
from tfkit.tools.profile.bars import (
    BarSegment,
    amount_text,
    by_model,
    colour_legend,
    labelled_bar,
    memory_text,
    name_swatch,
    optional_heading,
    ratio_text,
    share_text,
    side_by_side,
    time_text,
)
from tfkit.tools.profile.pictures import REMAINDER, UPDATE, floor_bars, layer_strips, roofline_chart, time_bars
from tfkit.tools.profile.result import ComponentTime, Profile, labels_of, summed_rows, undecided_notes


def profile_report(profiles: Sequence[Profile]) -> str:
    """Render a page about one profile, or about several profiles with their ratios to the first.

    The page is self-contained: it loads no files, runs no script, supports light and dark mode, and can be printed.
    Values from a spec are escaped. Raises ValueError without a profile.
    """
    if not profiles:
        raise ValueError("a report needs at least one profile")
    sections: list[PageSection] = [
        ("summary", "", summary_contents(profiles)),
        ("time", "Where the time goes", time_bars(profiles)),
        ("components", "Components, layers and modules", component_tables(profiles)),
        ("layers", "Layer by layer", layer_strips(profiles)),
        ("roofline", "Against the limits of the device", roofline_chart(profiles)),
        ("floor", "Measured and predicted", floor_bars(profiles)),
        ("memory", "Memory", memory_bars(profiles)),
        ("kernels", "The longest operators and kernels", kernel_tables(profiles)),
        ("measured", "How it was measured", measurement_method(profiles)),
    ]
    name = " and ".join(profile.name for profile in profiles)
    return report_page(name, "profile", dict.fromkeys(map(settings_line, profiles)), sections)


class Figure(NamedTuple):
    """A quantity of a step: its text, a note, and its fraction of a limit; None without a limit."""

    name: str
    text: str
    note: str
    value: float | None
    share: float | None = None


def settings_line(profile: Profile) -> str:
    """Format the settings of the run in one line: mode, sizes, dtype and device."""
    compiled = ["compiled"] if profile.compiled else []
    shape = f"{profile.batch:,} × {profile.length:,} tokens"
    return " · ".join([profile.mode, shape, profile.dtype, *compiled, profile.device_name])


def summary_contents(profiles: Sequence[Profile]) -> list[PageContent]:
    """Return tiles for one model, or a table with ratios for several."""
    figures = [_step_figures(profile) for profile in profiles]
    if len(profiles) == 1:
        return [tag("div", *map(_figure_tile, figures[0]), class_="tiles")]
    lines = zip(*figures, strict=True)
    cells = (
        (line[0].name, [(tag("span", figure.text, tag("small", figure.note)), figure.value) for figure in line])
        for line in lines
    )
    return [side_by_side("", profiles, cells), *map(remark, undecided_notes(profiles))]


def _step_figures(profile: Profile) -> tuple[Figure, ...]:
    flops = sum(part.flops or 0 for part in profile.parts)
    rate = flops / profile.plain_step if flops else None
    limit = profile.limits.flops
    share = rate / limit if rate else None
    spread = f"± {time_text(pstdev(profile.plain_steps))}, {len(profile.plain_steps)} steps"
    tokens = profile.tokens / profile.plain_step
    parameters = f"{amount_text(profile.parameters, '')} parameters"
    within = f"{100 * share:.1f}% of {amount_text(limit, 'FLOP/s')}" if share else "no limit to compare with"
    overhead = profile.step / profile.plain_step
    weights = f"{memory_text(profile.memory.weights)} are weights"
    return (
        Figure("step", time_text(profile.plain_step), spread, profile.plain_step),
        Figure("throughput", f"{amount_text(tokens, '')} tokens/s", parameters, tokens),
        Figure("achieved", amount_text(rate, "FLOP/s"), within, rate, share),
        Figure("peak memory", memory_text(profile.memory.peak), weights, profile.memory.peak),
        Figure("attributed", share_text(profile.attributed, 1), "of the step has a name", profile.attributed),
        Figure("profiler", ratio_text(profile.step, profile.plain_step), "of the step without it", overhead),
    )


def _figure_tile(figure: Figure) -> Element:
    style = f"width:{100 * min(1.0, figure.share or 0):.1f}%"
    return tag(
        "div",
        tag("div", figure.name, class_="what"),
        tag("div", figure.text, class_="figure"),
        tag("div", tag("i", style=style), class_="gauge") if figure.share else None,
        tag("div", figure.note),
        class_="tile",
    )


def measurement_method(profiles: Sequence[Profile]) -> list[PageContent]:
    """Describe the method of the measurement, its notes, and the other files written."""
    return by_model(profiles, _measurement_facts)


def _measurement_facts(profile: Profile) -> list[PageContent]:
    limits = profile.limits
    peaks = f"{amount_text(limits.flops, 'FLOP/s')} and {amount_text(limits.bandwidth, 'B/s')}"
    facts = {
        "model": f"{profile.name}, {profile.parameters:,} parameters",
        "run": settings_line(profile),
        "device": f"{profile.device_name} ({profile.device})",
        "steps": f"{len(profile.steps)} under the profiler, {len(profile.plain_steps)} without it",
        "limits": f"{peaks} ({limits.source})",
        "torch": torch.__version__,
    }
    return [terms(facts), bullets(profile.notes)]


COLUMNS = ("component", "time", "share", "forward", "backward", "FLOPs", "FLOP/s", "bytes/s", "at the peak")


def component_tables(profiles: Sequence[Profile]) -> list[PageContent]:
    """Return a comparison if there are two models, and for each model a table with rows that expand."""
    compared: list[PageContent] = [_comparison_table(profiles)] if len(profiles) > 1 else []
    words = "All times are of a step under the profiler, which is slower than a step without it."
    return [*compared, *by_model(profiles, _component_tree), remark(f"{words} A row opens to its layers and modules.")]


def _component_tree(profile: Profile) -> list[PageContent]:
    tree = tag("div", tag("div", *(tag("span", name) for name in COLUMNS), class_="row head"), class_="tree")
    tree.extend(_component_row(profile, row) for row in summed_rows(profile))
    remainder = (REMAINDER, time_text(profile.unattributed), share_text(profile.unattributed, profile.step))
    tree.append(_tree_row("rest", *remainder, *[""] * 6))
    tree.append(_total_row(profile))
    return [tag("div", tree, class_="scroll")]


def _component_row(profile: Profile, row: ComponentTime) -> Element:
    """Build the row of a component, with its layers and their modules below it; a leaf without layers and modules."""
    component = replace(profile, parts=tuple(part for part in profile.parts if part.component == row.component))
    layers = [_layer_row(component, layer) for layer in summed_rows(component, "layer")]
    alone = len(component.parts) == 1 and component.parts[0].path == row.path
    return _expandable_row(profile, row, row.label, [] if alone else layers, name=row.component)


def _layer_row(profile: Profile, row: ComponentTime) -> Element:
    parts = [part for part in profile.parts if part.layer == row.layer]
    if len(parts) == 1:
        return _expandable_row(profile, parts[0], parts[0].path, [])
    return _expandable_row(profile, row, row.path, [_expandable_row(profile, part, part.path, []) for part in parts])


def _expandable_row(
    profile: Profile, part: ComponentTime, label: str, inside: Sequence[Element], name: str = ""
) -> Element:
    """Build a row that expands to the rows inside it."""
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
    row = _tree_row(name, *cells, share=part.time / profile.step)
    return tag("details", tag("summary", row), *inside) if inside else row


def _tree_row(name: str, *cells: str, share: float = 0.0) -> Element:
    """Build a row. The row of a component has its colour, and a bar for its fraction of the step."""
    children = [tag("span", cell) for cell in cells]
    if name:
        children[0] = tag("span", name_swatch(name), cells[0])
        children[2].append(
            tag("i", class_=f"meter c-{'rest' if name == 'rest' else 'share'}", style=f"width:{100 * share:.1f}%")
        )
    return tag("div", *children, class_="row")


def _total_row(profile: Profile) -> Element:
    components = summed_rows(profile)
    forward = sum(row.forward for row in components if row.component not in UPDATE)
    backward = sum(row.backward for row in components)
    flops = sum(row.flops or 0 for row in components) or None
    rate = flops / profile.step if flops else None
    at_peak = sum(row.at_peak for row in components)
    times = (time_text(profile.step), share_text(1, 1), time_text(forward), time_text(backward) if backward else "")
    rates = (amount_text(flops, ""), amount_text(rate, ""), "", memory_text(at_peak or None))
    return tag("div", *(tag("span", cell) for cell in ("step", *times, *rates)), class_="row total")


def _comparison_table(profiles: Sequence[Profile]) -> Element:
    """Tabulate the time by component of each profile, and its ratio to the first."""
    of = [{row.component: row.time for row in summed_rows(profile)} for profile in profiles]
    lines: list[tuple[PageContent, list[float | None]]] = [
        (tag("span", name_swatch(name), label), [times.get(name) for times in of])
        for name, label in labels_of(profiles).items()
    ]
    lines.append((tag("span", name_swatch("rest"), REMAINDER), [profile.unattributed for profile in profiles]))
    lines.append(("step", [profile.step for profile in profiles]))
    return side_by_side(
        "component", profiles, ((name, [(time_text(time), time) for time in times]) for name, times in lines)
    )


KERNELS = 20
"""Maximum number of kernels that the report shows."""
INPUTS_AND_OTHERS = "inputs and others"


def memory_bars(profiles: Sequence[Profile]) -> list[PageContent]:
    """Draw the memory in use at the peak on one scale, with a table by component."""
    of = [_at_peak(profile) for profile in profiles]
    largest = max(sum(piece.value for piece in parts) for parts in of)
    children: list[PageContent] = []
    for profile, parts in zip(profiles, of, strict=True):
        children += [optional_heading(profile.name, len(profiles) > 1), _peak_sentence(profile)]
        children.append(labelled_bar("at the peak", parts, largest, memory_text(profile.memory.peak)))
    names = {piece.name: piece.text for parts in of for piece in parts if piece.value > 0}
    return [*children, colour_legend(names), *by_model(profiles, _by_component)]


def _peak_sentence(profile: Profile) -> PageContent:
    memory = profile.memory
    where = tag("p", "The peak of ", tag("b", memory_text(memory.peak)), class_="moment")
    if memory.part:
        where.extend([tag("span", f" comes in the {memory.phase} of "), tag("code", memory.part)])
    where.append(tag("span", f". Before the step, {memory_text(memory.at_start)} are in use."))
    return where


def _at_peak(profile: Profile) -> list[BarSegment]:
    """Return the bytes that persist between steps, the bytes of each component including gradients, and the rest."""
    memory = profile.memory
    parts = [("weights", "weights", memory.weights), ("optimizer", "optimizer state", memory.optimizer)]
    parts.append(("cache", "cache", memory.cache))
    parts += [(row.component, row.label, row.at_peak) for row in summed_rows(profile)]
    parts.append(("rest", INPUTS_AND_OTHERS, max(0, memory.peak - sum(size for _, _, size in parts))))
    return [
        BarSegment(name, size, label, share_text(size, memory.peak), f"{label}: {memory_text(size)}")
        for name, label, size in parts
    ]


def _by_component(profile: Profile) -> list[PageContent]:
    """Tabulate the bytes of each component: in use at the peak, allocated in a step, and the peak while it runs."""
    lines: list[list[PageContent]] = [
        [
            tag("span", name_swatch(row.component), row.label),
            memory_text(row.at_peak or None),
            share_text(row.at_peak or None, profile.memory.peak),
            memory_text(row.allocated or None),
            memory_text(row.highest or None),
        ]
        for row in summed_rows(profile)
    ]
    head = ["component", "in use at the peak", "share", "allocated in a step", "most in use while it runs"]
    return [page_table(head, lines)]


def kernel_tables(profiles: Sequence[Profile]) -> list[PageContent]:
    """Tabulate the longest operators or kernels of each profile, with the component that launched them."""
    return by_model(profiles, _kernel_table)


def _kernel_table(profile: Profile) -> Iterator[PageContent]:
    lines: list[list[PageContent]] = [
        [
            tag("code", kernel.name, title=kernel.name),
            tag("span", name_swatch(kernel.component), kernel.label),
            kernel.phase,
            amount_text(kernel.calls, ""),
            time_text(kernel.time),
            share_text(kernel.time, profile.step),
        ]
        for kernel in profile.kernels[:KERNELS]
    ]
    kind = "operator" if profile.device == "cpu" else "kernel"
    head = [kind, "launched by", "phase", "calls", "time", "share"]
    yield page_table(head, lines, text=3)
    if rest := profile.kernels[KERNELS:]:
        yield remark(f"{len(rest):,} more take {time_text(sum(kernel.time for kernel in rest))} together.")

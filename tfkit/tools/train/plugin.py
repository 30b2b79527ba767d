"""Runs and sweeps as types of document, and the properties of runs, registered as a plugin of tfkit."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import tfkit
from tfkit.building.edits import MeasuredModel
from tfkit.graph.documents import DocumentType
from tfkit.graph.expand import Graph
from tfkit.plugin.manager import Plugins
from tfkit.run.run_spec import RunSpec
from tfkit.run.sweep_spec import SweepSpec
from tfkit.spec.load import Spec


class Runs(DocumentType):
    """Runs: their models take sizes from their data, and their checks read both."""

    def model(self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Spec:
        """Read a run with its data, and return its model."""
        from tfkit.run.read_run import read_run

        run = read_run(name, plugins, sets=sets)
        return replace(run.model, notes=run.notes)

    def trained_model(
        self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()
    ) -> MeasuredModel | None:
        """Return the model of a run with its adapters; None for a run without adapters, whose data is then not read."""
        from tfkit.run.checked_run import check_run
        from tfkit.run.read_run import RunText, resolve_run
        from tfkit.spec.read_document import find_document
        from tfkit.tools.cost.of_run import flops_of_step
        from tfkit.tools.train.plan import trained_model

        text = RunText.read(find_document(name, RunSpec, plugins.specs), plugins, sets=sets)
        if "adapters" not in text.root.items:
            return None
        file = resolve_run(text, plugins)
        file = replace(file, model=replace(file.model, notes=file.notes))
        return trained_model(check_run(file, plugins, count=flops_of_step))

    def check(self, name: str | os.PathLike[str], plugins: Plugins, *, sets: Iterable[str] = ()) -> Graph:
        """Check that the model, the data, the steps and the initial weights of a run fit together."""
        from tfkit.run.checked_run import load_run
        from tfkit.run.training.start import check_start
        from tfkit.tools.cost.of_run import flops_of_step

        run = load_run(name, plugins, sets=sets, count=flops_of_step)
        check_start(run)
        return run.graph

    def template(self, spec: str, folder: Path, plugins: Plugins) -> str:
        """Return the text of a run that trains a spec on data that comes with tfkit."""
        from tfkit.tools.train.run_file import run_text

        return run_text(spec, folder, plugins)

    def weight_warnings(self, weights: Path, graph: Graph) -> list[tfkit.Diagnostic]:
        """Return a warning if a run wrote the weights, and the code of the model's kinds has changed since then."""
        from tfkit.run.run_code import warnings_about

        return warnings_about(weights, graph.spec.model)


@tfkit.hookimpl
def tfkit_documents() -> list[DocumentType]:
    """Return the types of the files that `tfkit train` and `tfkit sweep` take."""
    return [Runs(RunSpec), DocumentType(SweepSpec)]


@tfkit.hookimpl
def tfkit_properties() -> list[tfkit.Property | tfkit.SubjectType]:
    """Return the properties of a training step, in the order in which they are checked, and runs as their subject."""
    from tfkit.tools.train.check import data, optimizer, options, record, schedule, step
    from tfkit.tools.train.check.small_run import RunSubject

    return [
        RunSubject(),
        *(step.finite_steps, step.step_targets, step.loss_sums, step.loss_formula),
        *(step.dropout_noise, step.gradient_clipping, step.numbers_of_steps),
        *(
            schedule.schedule_factors,
            schedule.step_rates,
            optimizer.group_settings,
            optimizer.decay_effect,
            optimizer.optimizer_formula,
            optimizer.base_settings,
        ),
        *(options.option_effects, data.example_independence, data.epoch_order, data.metric_values),
        *(record.evaluation_effect, record.callback_effects, record.resumed_run, record.digest_coverage),
    ]

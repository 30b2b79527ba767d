"""Run a model, and report its time and memory."""

from __future__ import annotations

import os
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tfkit.console import options
from tfkit.console.commands import Reader, command
from tfkit.console.completion import complete_spec
from tfkit.console.output import print_json, print_tables, progress_bar, with_titles
from tfkit.errors import printable_text
from tfkit.tools.common.modes import mode_option

if TYPE_CHECKING:
    from tfkit.tools.common.ownership import By

MAX_SPECS = 2
"""Maximum number of specs to compare."""
QUIET = {"KINETO_LOG_LEVEL": "99", "TORCH_CPP_LOG_LEVEL": "ERROR"}
"""Suppresses the profiler's own messages, which would appear between ours; read when torch is imported."""


@command(
    "profile",
    section="Tools",
    order=470,
    notes="""
    A step is a training step (zero_grad, forward, loss, backward, AdamW), the
    prefill of --length tokens into the caches, or one decoding step after
    --length - 1 tokens. The step runs first without the profiler, then with the
    profiler, which measures the times of components. `floor` is the minimum time
    on the device, as `tfkit cost` predicts it, in percent of the measured time. The
    limits of a CPU are measured.

    With -o, DIR gets report.html, profile.json, and for each spec a folder for
    TensorBoard: scalars, and a trace for torch-tb-profiler, which Perfetto and
    chrome://tracing also open.

        tensorboard --logdir DIR

    With --compile, the model is a single row, because its kernels cross
    components.
    """,
    examples="""
    tfkit profile gpt2
    tfkit profile gpt2 --mode decode --length 512 --by layer
    tfkit profile gpt2 gpt2_medium -o profile
    tfkit profile llama3_8b --device cuda --dtype bfloat16 --batch 4
    """,
)
@click.argument("specs", nargs=-1, required=True, metavar="SPEC [SPEC]", shell_complete=complete_spec)
@click.option("--device", metavar="NAME", help="cpu, cuda or cuda:1; by default cuda if available.")
@mode_option("The kind of step: train, prefill or decode.")
@options.dtype_option("Type of weights and activations: float32, bfloat16, float16 or float64.", default="float32")
@click.option("--compile", is_flag=True, help="Compile the entire model.")
@options.batch_option
@options.count_option("--length", "Tokens of each sequence.  [default: 128, or max_len]")
@options.count_option("--steps", "Number of timed steps.", default=5, minimum=2)
@options.count_option("--warmup", "Number of untimed steps before them.", default=2, minimum=0)
@options.by_option
@options.weights_option(otherwise="random")
@options.allow_change_option
@options.output_option("DIR", "Write all results to this folder.")
@options.json_option
def profile(
    reader: Reader,
    specs: tuple[str, ...],
    device: str | None,
    dtype: str,
    by: By,
    weights: Path | None,
    allow_change: bool,
    output: Path | None,
    json: bool,
    **options: Any,
) -> None:
    if len(specs) > MAX_SPECS:
        raise click.UsageError(f"the command must have one or two specs; got {len(specs)}")
    if weights is not None and len(specs) > 1:
        raise click.UsageError("--weights cannot be combined with several models")
    for name, level in QUIET.items():
        os.environ.setdefault(name, level)
    graphs = with_titles([reader.load(spec) for spec in specs], specs)
    sources = [reader.weights(spec, weights, allow_change=allow_change) for spec in specs]
    from tfkit.tools.profile.models import profile_models, to_dict
    from tfkit.tools.profile.profile_tables import show_profiles

    with progress_bar() as on_progress:
        profiles = profile_models(
            graphs,
            device=_available_device(device),
            allow_change=allow_change,
            dtype=dtype,
            directory=output,
            weights=sources,
            on_step=lambda done, of: on_progress(done, of, "steps"),
            **options,
        )
    if json:
        print_json([to_dict(result) for result in profiles])
        return
    show_profiles(profiles, by)
    if output is not None:
        print_tables("", _written_text(output))


def _written_text(folder: Path) -> str:
    text, tensorboard = printable_text(str(folder)), shlex.join(["tensorboard", "--logdir", str(folder)])
    return f"wrote {text}: open {text}/report.html, or {printable_text(tensorboard)}"


def _available_device(name: str | None) -> Any:
    """Return an available device; a device that cannot run anything is a usage error."""
    if name is None:
        return None
    if name == "meta":
        raise click.BadParameter("nothing runs on the meta device: use `tfkit cost`", param_hint="--device")
    return options.device_of(name)

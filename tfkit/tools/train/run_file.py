"""A commented run file for a model, which trains on data that comes with tfkit."""

from __future__ import annotations

import os
from pathlib import Path

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.graph.expand import load
from tfkit.graph.input_shapes import max_len
from tfkit.plugin.manager import Plugins
from tfkit.run.checked_run import load_run
from tfkit.spec.source import parse, plain_data

LENGTH = 64
"""Length of the examples, unless the model accepts fewer positions."""
TEXT = "{kind: text, files: tinyshakespeare}"
DATA = {
    "decoder": (TEXT, "loss, accuracy, bits_per_byte"),
    "encoder": (f"{{kind: masked, of: {TEXT}}}", "loss, accuracy"),
    "encoder-decoder": ("{kind: copy, task: reverse, layout: pair}", "loss, accuracy"),
}
"""The data and the metrics for a model, by its blocks."""
RUN = """\
tfkit: 1
name: {name}

model: {model}    # a name, a path, or a mapping: {{extends: {model}, dropout: 0.1}}
# weights: DIR                    # begin with the weights of a run or of a published folder

# The kinds `documents`, `pairs`, `labelled` and `choices` read jsonl, csv, parquet and arrow files: docs/data.md.
data: {data}
batch: {batch}    # of one update
steps: 100                        # or `tokens`, `epochs`, `flops`

optimizer: {{kind: adamw, lr: 3e-4, weight_decay: 0.1}}
schedule: {{kind: cosine, warmup: 10}}
clip: 1.0                         # the largest norm of the gradient
# precision: bfloat16             # the type to compute in; weights stay float32

eval: {{every: 50, splits: {{val: {{batches: 4}}}}, metrics: [{metrics}]}}
checkpoint: {{every: 50}}
# callbacks: [{{kind: patience, metric: val.loss}}, {{kind: ema, decay: 0.99}}]
# track: tensorboard              # or wandb, mlflow
# machine: {{device: cuda, micro_batch: 4, compile: true}}
"""


def run_text(spec: str, folder: Path, plugins: Plugins) -> str:
    """Return the text of a run of a spec, for a file in `folder`.

    Raise SpecError if the spec is invalid, or if no data that comes with tfkit fits its model.
    """
    graph = load(spec, plugins=plugins)
    blocks = {node.config.kind_name() for node in graph.nodes} & DATA.keys()
    data, metrics = DATA["encoder-decoder" if len(blocks) == 2 else next(iter(blocks), "decoder")]
    length = min(LENGTH, max_len(graph) or LENGTH)
    batch = "{sequences: 8}" if "copy" in data else f"{{sequences: 8, length: {length}}}"
    is_path = os.path.exists(spec)
    model = os.path.relpath(spec, folder) if is_path else spec
    # A bare word would be the name of a spec.
    model = f"./{model}" if is_path and os.sep not in model else model
    text = RUN.format(name=f"train_{graph.name}"[:100], model=model, data=data, batch=batch, metrics=metrics)
    values = plain_data(parse(text, "the new run")) | {"model": os.path.abspath(spec) if is_path else spec}
    try:
        load_run(values, plugins)
    except SpecError as error:
        notes = tuple(diagnostic.message for diagnostic in error.diagnostics)
        help = "write the run by hand: docs/data.md shows each kind of data"
        message = f"no data that comes with tfkit fits the model {quoted(spec)}"
        raise SpecError(Diagnostic(message, notes=notes, help=help)) from error
    return text

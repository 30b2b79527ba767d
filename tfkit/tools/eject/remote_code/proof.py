"""Verification of a folder: transformers opens it in a process without tfkit, and the results are compared."""

from __future__ import annotations

import importlib.util
import json
import math
from collections.abc import Mapping
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, fx

from tfkit.building.builder import allocate_tensors, build, evaluation_mode
from tfkit.building.initialize import initialize
from tfkit.checkpoint.remote_code import transformers_map
from tfkit.checkpoint.weight_map import WeightMap
from tfkit.component import State
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.expand import Graph
from tfkit.graph.input_shapes import max_len
from tfkit.spec.folder import CONFIG
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.common.memory_needs import free_memory, size_of
from tfkit.tools.common.model_inputs import as_tensors, random_inputs
from tfkit.tools.eject.remote_code import proof_runner
from tfkit.tools.eject.remote_code.parts import Parts
from tfkit.tools.eject.remote_code.proof_runner import ModelFacts, sample_moments

MAX_PARAMETERS = 2**30
"""Largest number of parameters for which the model is run. A larger model would take minutes."""
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""Largest difference of a cached step, relative to the largest logit, by dtype; 0.05 for narrow types."""


def check_transformers() -> None:
    """Raise SpecError if transformers is not installed."""
    if importlib.util.find_spec("transformers") is None:
        message = "the layout transformers needs `transformers`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[transformers]"'))


class Folders(Isolated):
    """A process with transformers that opens folders one after the other."""

    def __init__(self) -> None:
        self._scratch = TemporaryDirectory()
        self.scratch = Path(self._scratch.name)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_MODULES_CACHE": str(self.scratch)}
        super().__init__(proof_runner.__file__, offline)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._scratch.cleanup()


def compare_folder(model: fx.GraphModule, parts: Parts, folder: Path, process: Folders) -> bool:
    """Compare a folder with the model that was written to it.

    Return False if only the tensors were compared, because the model is too large to run. Raise SpecError if they
    differ.
    """
    config = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    # The windows and chunks of transformers count padding.
    facts = _facts_of(model, parts, inside=config.keys().isdisjoint(("sliding_window", "attention_chunk_size")))
    location = process.scratch / "facts.pt"
    torch.save(facts, location)
    if error := process.answer([str(folder), str(location)]):
        message = f"the folder differs from the model: {error}"
        help = "write each component so that its forward and its initial weights depend only on its code and its fields"
        raise SpecError(Diagnostic(message, help=help))
    return bool(facts["outputs"])


def _facts_of(model: fx.GraphModule, parts: Parts, *, inside: bool) -> ModelFacts:
    """Return the shapes of a model's tensors and, for a small model, its results for random inputs and padding.

    With `inside`, padding is also between tokens.
    """
    graph, weights = parts.graph, transformers_map(model, parts.graph, parts.names)
    shapes = {name: list(tensor.shape) for name, tensor in weights.tensors(model.state_dict())}
    count = sum(parameter.numel() for parameter in model.parameters())
    free = free_memory(torch.device("cpu"))
    runs = count <= MAX_PARAMETERS and (free is None or 2 * size_of(model) < free)
    length = min(20, max_len(graph) or 20)
    dtype = next(model.parameters()).dtype
    inputs = random_inputs(graph, batch=3, length=length, dtype=dtype)
    masks = _padding_masks(parts, length, inside=inside)
    outputs: dict[str, Tensor] = {}
    padded: dict[str, Tensor] = {}
    steps, lengths, tolerance = parts.last.input, [length] * parts.decodes, TOLERANCE.get(dtype, 0.05)
    initial: dict[str, list[float]] = {}
    if runs:
        initial = initial_moments(graph, dtype, weights)
        with torch.no_grad(), evaluation_mode(model):
            outputs = _named_results(model, parts, inputs)
            tolerance *= max(1.0, *(float(output.abs().max()) for output in outputs.values()))
            first = length - length // 2
            if parts.decodes:
                prefix = _named_results(model, parts, inputs | {steps: inputs[steps][:, :first]})["logits"]
                difference = (prefix - outputs["logits"][:, :first]).abs().max()
            if not parts.decodes or (length > 6 and difference <= tolerance):
                lengths = [first, *[1] * (length - first - 3), 3] if parts.decodes else []
                padded = _unpadded_results(model, parts, inputs, masks, outputs) if masks else {}
            else:  # positions depend on the length of the sequence, but a cache has keys of shorter lengths
                masks = {name: mask | (torch.arange(3) == 2)[:, None] for name, mask in masks.items()}
                padded = _named_results(model, parts, inputs | {f"{name}_mask": mask for name, mask in masks.items()})
    arguments = parts.arguments
    features = {name: value.transpose(1, 2) for name, value in inputs.items() if arguments[name] == "input_features"}
    return ModelFacts(
        shapes=shapes,
        initial=initial,
        auto=f"AutoModel{parts.task.auto}",
        inputs={arguments[name]: value for name, value in (inputs | features).items()},
        masks={arguments[name].replace("input_ids", "attention_mask"): mask for name, mask in masks.items()},
        outputs=outputs,
        padded=padded,
        steps=arguments[steps],
        step_lengths=lengths,
        tolerance=tolerance,
        stateful=parts.last.decodes and any(isinstance(entry, State) for entry in chain(*parts.last.decoding.caches)),
        exact=parts.names is None,
        threads=torch.get_num_threads(),
    )


def initial_moments(graph: Graph, dtype: torch.dtype, weights: WeightMap | None = None) -> dict[str, list[float]]:
    """Return the `sample_moments` of the tensors of a new model, by the names of a map or of the model.

    Tensors that are equal for all seeds have the variance 0.
    """
    model = build(graph, device="meta", dtype=dtype)
    allocate_tensors(model, "cpu")
    weights = weights or WeightMap.of_model(model)
    seeds: list[dict[str, list[float]]] = []
    for seed in range(2):
        initialize(model, graph, seed)
        seeds.append({name: sample_moments(tensor) for name, tensor in weights.tensors(model.state_dict())})
    result: dict[str, list[float]] = {}
    for name, (mean, mean_variance, square, square_variance) in seeds[0].items():
        fixed = seeds[0][name] == seeds[1][name]
        # A random tensor of a single value has no distribution that could be compared.
        variances = [0.0 if fixed else variance or math.inf for variance in (mean_variance, square_variance)]
        result[name] = [mean, variances[0], square, variances[1]]
    return result


def _padding_masks(parts: Parts, length: int, *, inside: bool) -> dict[str, Tensor]:
    """Return a mask for each input that may be padded, with padding at either end and `inside`."""
    mask = torch.ones(3, length, dtype=torch.bool)
    mask[1, : length // 3] = False
    mask[2, length // 2] = not inside
    mask[2, -1] = False
    return {body.input: mask.clone() for body in parts.bodies if body.embedding is not None}


def _named_results(model: fx.GraphModule, parts: Parts, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the results of a model by their names in transformers."""
    results = as_tensors(model(**inputs))
    if parts.head:
        return {"logits": results[0]}
    vector = parts.vector.name if parts.vector else None
    names = ["pooler_output" if name == vector else "last_hidden_state" for name in parts.graph.outputs]
    return dict(zip(names, results, strict=True))


def _unpadded_results(
    model: fx.GraphModule,
    parts: Parts,
    inputs: Mapping[str, Tensor],
    masks: Mapping[str, Tensor],
    outputs: Mapping[str, Tensor],
) -> dict[str, Tensor]:
    """Return the results of each sequence without its padding, because the model may reject padding between tokens.

    Results at padding are NaN, which is not compared.
    """
    padded = {name: torch.full_like(output, torch.nan) for name, output in outputs.items()}
    for row in range(3):
        selected = {name: masks[name][row] if name in masks else slice(None) for name in inputs}
        selected |= {types: selected[body.input] for body in parts.bodies if (types := body.types)}
        results = _named_results(
            model, parts, {name: value[row, selected[name]][None] for name, value in inputs.items()}
        )
        for name, result in results.items():
            is_sequence = result.shape[1:] != outputs[name].shape[1:] or name == "last_hidden_state"
            padded[name][row, selected[parts.last.input] if is_sequence else slice(None)] = result[0]
    return padded

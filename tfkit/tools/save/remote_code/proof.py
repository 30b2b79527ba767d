"""Proof that a folder is the model: transformers opens it in a process without tfkit, and it computes the same."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, fx

from tfkit.building.builder import evaluating, graph_of
from tfkit.errors import Diagnostic, SpecError
from tfkit.graph.input_shapes import max_len
from tfkit.tools.common.isolated import Isolated
from tfkit.tools.common.memory_needs import free_memory, size_of
from tfkit.tools.common.model_inputs import random_inputs
from tfkit.tools.save.remote_code import proof_runner
from tfkit.tools.save.remote_code.proof_runner import ModelFacts
from tfkit.tools.save.remote_code.separate import Parts

LARGEST = 2**30
"""Largest number of parameters for which the folder is run: a larger model takes minutes."""
TOLERANCE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""Largest difference of a cached step, relative to the largest logit, by dtype; 0.05 for narrow types."""


def check_transformers() -> None:
    """Raise SpecError if transformers, which the proof needs, is missing."""
    if importlib.util.find_spec("transformers") is None:
        message = "the layout transformers needs `transformers`, which is not installed"
        raise SpecError(Diagnostic(message, help='pip install "tfkit[transformers]"'))


class Folders(Isolated):
    """Opens folders in a process with transformers, one after the other."""

    def __init__(self) -> None:
        self._scratch = TemporaryDirectory()
        self.scratch = Path(self._scratch.name)
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "HF_MODULES_CACHE": str(self.scratch)}
        super().__init__(proof_runner.__file__, offline)

    def __exit__(self, *details: object) -> None:
        super().__exit__(*details)
        self._scratch.cleanup()


def prove(model: fx.GraphModule, parts: Parts, folder: Path, process: Folders) -> bool:
    """Compare a folder with the model that was written to it.

    Return False if the model is too large to run, and only its tensors were compared. Raise SpecError if they differ.
    """
    facts = _facts_of(model, parts)
    place = process.scratch / "facts.pt"
    torch.save(facts, place)
    if error := process.answer([str(folder), str(place)]):
        message = f"the folder differs from the model: {error}"
        help = "write the forward of each component so that it depends only on its code and its fields"
        raise SpecError(Diagnostic(message, help=help))
    return facts["tokens"] is not None


def _facts_of(model: fx.GraphModule, parts: Parts) -> ModelFacts:
    graph = graph_of(model)
    shapes = {parts.name_in_folder(name): list(tensor.shape) for name, tensor in model.state_dict().items()}
    count = sum(parameter.numel() for parameter in model.parameters())
    free = free_memory(torch.device("cpu"))
    runs = count <= LARGEST and (free is None or 2 * size_of(model) < free)
    length = min(20, max_len(graph) or 20)
    inputs = random_inputs(graph, batch=3, length=length)
    tokens, *further = inputs.values()
    name = next(iter(inputs))
    mask = torch.ones_like(tokens, dtype=torch.bool)
    mask[1, : length // 3] = False
    mask[2, length // 2] = False
    mask[2, -1] = False
    dtype = next(model.parameters()).dtype
    logits: list[Tensor] = []
    pieces, tolerance = [length] * parts.decodes, TOLERANCE.get(dtype, 0.05)
    if runs:
        with torch.no_grad(), evaluating(model):
            unpadded = model(tokens, *further)
            logits = [unpadded, torch.zeros_like(unpadded)]
            tolerance *= max(1.0, float(unpadded.abs().max()))
            first = length - length // 2
            prefix = model(*(value[:, :first] for value in inputs.values())) - unpadded[:, :first]
            if not parts.decodes or (length > 6 and prefix.abs().max() <= tolerance):
                pieces = [first, *[1] * (length - first - 3), 3] if parts.decodes else []
                for row, kept in enumerate(mask):  # a sequence alone: the model may reject padding between tokens
                    logits[1][row, kept] = model(*(value[row, kept][None] for value in inputs.values()))[0]
            else:  # positions are scaled by the length of the sequence, and a cache has the keys of shorter ones
                mask[2] = True
                logits[1] = model(tokens, **{f"{name}_mask": mask})
    return ModelFacts(
        shapes=shapes,
        auto=f"AutoModel{parts.head_class}",
        tokens=tokens if runs else None,
        types=further[0] if further else None,
        mask=mask,
        logits=logits,
        pieces=pieces,
        tolerance=tolerance,
        threads=torch.get_num_threads(),
    )

"""The weights as an archive of numpy arrays."""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor, fx

import tfkit


class Npz(tfkit.Format):
    name = "npz"
    suffixes = (".npz",)
    description = "the weights as an archive of numpy arrays"

    def write(self, model: fx.GraphModule, inputs: dict[str, Tensor], path: Path) -> None:
        with path.open("wb") as file:
            np.savez(file, **{name: tensor.numpy() for name, tensor in model.state_dict().items()})

    def open(self, path: Path, model: fx.GraphModule) -> tfkit.Opened:
        built = tfkit.build(model.meta["graph"]).eval()
        with np.load(path) as arrays:
            built.load_state_dict({name: torch.from_numpy(arrays[name]) for name in arrays.files})
        return Arrays(built)


class Arrays(tfkit.Opened):
    """A model that was built anew and filled from the arrays."""

    def __init__(self, model: fx.GraphModule) -> None:
        self.model = model

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [self.model(**inputs)]

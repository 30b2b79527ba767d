"""A folder with a LoRA adapter in the layout of PEFT: its settings, and the weights that the adapter changes."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfkit.errors import Diagnostic, SpecError, quoted
from tfkit.spec.folder import ADAPTER, INDEX, MAX_CONFIG, RUN, WEIGHTS, model_folder
from tfkit.spec.header import quoted_path, read_object

BASE, ALPHA, RSLORA, ALPHAS = "base_model_name_or_path", "lora_alpha", "use_rslora", "alpha_pattern"
DEFAULT_ALPHA = 8
"""The alpha of PEFT."""
WITHOUT_EFFECT = frozenset(
    """
    arrow_config auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config exclude_modules
    fan_in_fan_out inference_mode layers_pattern layers_to_transform loftq_config lora_dropout lora_ga_config
    megatron_core peft_version qalora_group_size r rank_pattern revision runtime_config target_modules task_type
    """.split()  # noqa: SIM905
)
"""Fields of `adapter_config.json` that do not change the merged weights: the tensors have the ranks."""
_PLAIN_PATTERN = re.compile(r"\^?[\w.\\]+\$?")
"""Regular expressions of modules that cannot take long."""
MERGE_HELP = "merge the adapter with `merge_and_unload()` of PEFT, save the model, and use its folder"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _are_numbers(value: object) -> bool:
    if not isinstance(value, dict):
        return value is None
    return all(_PLAIN_PATTERN.fullmatch(key) and _is_number(number) for key, number in value.items())


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "peft_type": (lambda value: value == "LORA", '"LORA", the only kind of adapter that tfkit opens'),
    "bias": (lambda value: value in (None, "none"), '"none": tfkit opens no adapter with biases'),
    "init_lora_weights": (
        lambda value: value in (None, True, False, "gaussian", "orthogonal"),
        "a value that does not change the base, such as true",
    ),
    ALPHA: (lambda value: value is None or _is_number(value), "a number"),
    RSLORA: (lambda value: value in (None, True, False), "true or false"),
    ALPHAS: (_are_numbers, "a mapping of the names of modules to numbers"),
}
"""Fields of `adapter_config.json` that are read, each with its condition and a description of its values."""


@dataclass(frozen=True)
class AdapterSettings:
    """The settings of an adapter that determine the merged weights."""

    folder: Path
    base: Path
    """The folder or the file of the weights that the adapter changes."""
    alpha: float
    rslora: bool
    alphas: Mapping[str, float]
    """Values of alpha for the modules that match a regular expression, as PEFT matches them."""

    def scale(self, module: str, rank: int) -> float:
        """Return the factor of the product of the two matrices of a module: alpha / rank, or alpha / sqrt(rank)."""
        matches = (value for key, value in self.alphas.items() if re.match(rf"(.*\.)?({key})$", module))
        return next(matches, self.alpha) / (math.sqrt(rank) if self.rslora else rank)

    @property
    def content(self) -> list[Any]:
        """The settings that belong to the digest of the weights, as JSON data."""
        return [self.alpha, self.rslora, sorted(self.alphas.items())]


def read_adapter(folder: Path) -> AdapterSettings:
    """Read the settings of the adapter in a folder.

    Raises SpecError if they cannot be read, or describe an adapter that is more than two matrices for each module.
    """
    path = folder / ADAPTER
    fields = read_object(path, max_bytes=MAX_CONFIG)

    def error(name: str, expected: str, help: str = MERGE_HELP) -> SpecError:
        got = quoted(repr(fields[name])) if name in fields else "nothing"
        message = f"`{name}` of {quoted_path(path)} must be {expected}; got {got}"
        return SpecError(Diagnostic(message, help=help))

    for name, (is_valid, expected) in _FIELDS.items():
        if not is_valid(fields.get(name)):
            raise error(name, expected)
    for name, value in fields.items():
        if name not in WITHOUT_EFFECT and name not in _FIELDS and value not in (None, False, [], {}):
            raise error(name, "unset: tfkit opens LoRA without extensions")
    base = fields.get(BASE)
    if not isinstance(base, str) or not base:
        help = f"write the folder to {quoted_path(path)}"
        raise error(BASE, "the folder of the model that the adapter changes", help)
    alpha = DEFAULT_ALPHA if fields.get(ALPHA) is None else fields[ALPHA]
    return AdapterSettings(folder, _base_of(folder, base), alpha, bool(fields.get(RSLORA)), fields.get(ALPHAS) or {})


def base_folder(folder: Path) -> Path:
    """Return the folder or the file of the weights that the adapter in a folder changes, below any further adapters."""
    seen: set[str] = set()
    while os.path.isfile(folder / ADAPTER) and not any(os.path.lexists(folder / name) for name in (WEIGHTS, INDEX)):
        if (real := os.path.realpath(folder)) in seen:
            message = f"the adapter in {quoted_path(folder)} must change the weights of a model; got itself"
            raise SpecError(Diagnostic(message, help=f"correct `{BASE}` of the adapter"))
        seen.add(real)
        folder = read_adapter(folder).base
    return folder


def base_help(folder: Path) -> str:
    """Return the help of an error about the weights that the adapter in a folder changes: missing, or different ones.

    The run that wrote the adapter names them, too, and continues only with the weights that it began with.
    """
    file, run = quoted_path(folder / ADAPTER), folder.parent / RUN
    if not os.path.isfile(run):
        return f"download the model, and write its folder as `{BASE}` to {file}"
    change = f"write its folder as `{BASE}` to {file}, and as `weights` to {quoted_path(run)}"
    return f"restore the model that the adapter changes, or {change}"


def _base_of(folder: Path, name: str) -> Path:
    """Return the weights that an adapter changes. A relative path starts at the adapter's folder, else here."""
    path = next((path for path in (folder / name, Path(name)) if os.path.exists(path)), None)
    if path is None:
        message = f"the adapter in {quoted_path(folder)} changes the model {quoted(name)}, and there is no such folder"
        raise SpecError(Diagnostic(message, help=base_help(folder)))
    return model_folder(path)

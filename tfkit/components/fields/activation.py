"""The field that names an activation, for FFNs, experts and heads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from tfkit.component import ABSENT, Component, FieldConfig, Reading, Writing, case_of
from tfkit.components.fields.words import first_word, known_word

EXACT, TANH = ({"kind": "gelu", "approximate": approximate} for approximate in ("none", "tanh"))
ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in ("silu", "relu", "relu2", "quick_gelu", "tanh", "sigmoid", "xielu")},
    "swish": {"kind": "silu"},
    **dict.fromkeys(("gelu", "gelu_python"), EXACT),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"), TANH),
}
"""The activations of transformers by name; of several names of one activation, the first is written."""
GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""The gated FFNs that have a separate name, by activation."""
PLAIN = ("relu", "gelu", "silu", "relu2", "quick_gelu")
"""The FFNs without a gate that have the name of their activation."""
SLOT, FFN = ".activation", ".ffn"


class ActivationNameConfig(FieldConfig):
    """The name of an activation: `{activation: decoder.ffn}`."""

    kind: Literal["activation"] = "activation"
    activation: str | tuple[str, ...]
    """The path of a stack's FFN, which stands for the FFNs of all variants, or of a slot `activation`; or several
    paths. An FFN stays gated or plain, and keeps its sizes."""
    older: dict[str, str] = Field(default_factory=dict)
    """Names that mean the activation of another name here: `{gelu: gelu_pytorch_tanh}`."""

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths."""
        return (self.activation,) if isinstance(self.activation, str) else self.activation

    def read(self, name: str, file: Reading) -> None:
        word = known_word(name, file.value(name), ACTIVATIONS, file)
        activation = ACTIVATIONS[self.older.get(word, word)]
        for path in filter(file.reaches, self.paths):
            _apply(path, file.at(path), activation, file)
            stack = path.removesuffix(FFN)
            variants = file.variants(stack) if stack != path else {}
            for variant, changes in variants.items():
                if isinstance(changes, Mapping) and "ffn" in changes:
                    _apply(f"{stack}.layers.variants.{variant}{FFN}", changes["ffn"], activation, file)

    def write(self, name: str, file: Writing) -> None:
        paths = [place for path in self.paths for place in (path, *_in_variants(path, file))]
        values = {path: value for path in paths if (value := file.value(path)) not in (None, ABSENT)}
        kinds = {path: value.kind_name() if isinstance(value, Component) else "" for path, value in values.items()}

        def fits(word: str) -> bool:
            placed = (_placed(path, kind, ACTIVATIONS[word]) for path, kind in kinds.items())
            return word not in self.older and all(file.says(*place) for place in placed)

        words = [word for word in ACTIVATIONS if fits(word)]
        default = case_of(file.default(name))
        file.put(name, default if default in words else first_word(words, name, ACTIVATIONS))


def _in_variants(path: str, file: Writing) -> list[str]:
    """Return the paths of the FFN in the variants of its stack."""
    variants = file.value(f"{path.removesuffix(FFN)}.layers.variants") if path.endswith(FFN) else None
    names = variants if isinstance(variants, Mapping) else {}
    return [f"{path.removesuffix(FFN)}.layers.variants.{name}{FFN}" for name in names]


def _apply(path: str, value: Any, activation: dict[str, Any], file: Reading) -> None:
    """Give the component at a path, of which `value` is the text, an activation."""
    current = value if isinstance(value, Mapping) else {"kind": value}
    where, form = _placed(path, str(current.get("kind")), activation)
    if where != path or path.endswith(SLOT):
        file.put(where, form)
    elif form != {key: current.get(key) for key in form}:
        rest = {key: entry for key, entry in current.items() if key not in ("kind", "approximate", "activation")}
        file.put(path, {**form, **rest})


def _placed(path: str, kind: str, activation: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the path and the value that set the activation of a kind: an FFN, or a slot `activation`."""
    if path.endswith(SLOT):
        return path, activation
    if kind in (*GATED.values(), "glu"):
        gated = GATED.get(activation["kind"])
        return path, {**activation, "kind": gated} if gated else {"kind": "glu", "activation": activation}
    if kind in (*PLAIN, "mlp"):
        return path, activation if activation["kind"] in PLAIN else {"kind": "mlp", "activation": activation}
    return f"{path}{SLOT}", activation

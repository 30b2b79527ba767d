"""Fields whose values are words: of a table, the labels of a classifier, and the names of activations."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal

from pydantic import Field

from tfkit.component import ABSENT, Component, FieldConfig, Reading, Writing, case_of, value_of
from tfkit.errors import Invalid, listing, quoted

TABLES: Mapping[str, Mapping[str, Any]] = {
    "tie": {"true": "embedding", "false": None},
    "scale": {"true": "sqrt_d_model", "false": None},
}
"""Tables that many families share."""
DEFAULT_CLASSES = 2
"""Number of classes if a config.json does not set it."""
EXACT_GELU, TANH_GELU = ({"kind": "gelu", "approximate": approximate} for approximate in ("none", "tanh"))
ACTIVATIONS: Mapping[str, dict[str, Any]] = {
    **{kind: {"kind": kind} for kind in ("silu", "relu", "relu2", "quick_gelu", "tanh", "sigmoid", "xielu")},
    "swish": {"kind": "silu"},
    **dict.fromkeys(("gelu", "gelu_python"), EXACT_GELU),
    **dict.fromkeys(("gelu_pytorch_tanh", "gelu_new", "gelu_fast", "gelu_python_tanh", "gelu_accurate"), TANH_GELU),
}
"""The activations of transformers by name. If an activation has several names, the first is written."""
GATED = {"silu": "swiglu", "gelu": "geglu", "relu": "reglu"}
"""The gated FFNs that have a separate name, by activation."""
UNGATED_KINDS = ("relu", "gelu", "silu", "relu2", "quick_gelu")
"""The FFNs without a gate that have the name of their activation."""
SLOT, FFN = ".activation", ".ffn"


class WordsConfig(FieldConfig):
    """A word for one value of the spec: `{words: tie, at: logits.tie}`."""

    kind: Literal["words"] = "words"
    words: str | dict[str, Any]
    """The value for each word; or the name of a table: see `TABLES`."""
    at: str | tuple[str, ...]
    """The path of the value, or of several that share it."""

    def check(self) -> None:
        """Raise `Invalid` for an unknown name of a table."""
        super().check()
        if isinstance(self.words, str) and self.words not in TABLES:
            message = f"there is no table {quoted(self.words)}"
            raise Invalid(
                "words", message, help=f"choose one of {listing(TABLES)}, or write a table here: `{{word: value}}`"
            )

    @property
    def table(self) -> Mapping[str, Any]:
        """The value for each word."""
        return TABLES[self.words] if isinstance(self.words, str) else self.words

    @property
    def paths(self) -> tuple[str, ...]:
        """The paths of the value."""
        return (self.at,) if isinstance(self.at, str) else self.at

    def read(self, name: str, file: Reading) -> None:
        word = known_word(name, file.value(name), self.table, file)
        for path in self.paths:
            file.put(path, self.table[word])

    def write(self, name: str, file: Writing) -> None:
        fit = [word for word, value in self.table.items() if all(file.says(path, value) for path in self.paths)]
        file.put(name, value_of(first_word(fit, name, self.table)))


class CasesConfig(FieldConfig):
    """A value for changes in several places of the spec: `{cases: {"true": {decoder.placement: parallel}, ...}}`."""

    kind: Literal["cases"] = "cases"
    cases: dict[str, dict[str, Any]]
    """For each value of the field the changes of the spec by path."""
    unread: Any = None
    """The value to write where other fields leave the field without a meaning; it is omitted if null."""
    idle: tuple[Any, ...] | None = None
    """Values that the field may have where other fields make it meaningless; by default, all values."""

    def read(self, name: str, file: Reading) -> None:
        for path, changed in self.cases[known_word(name, file.value(name), self.cases, file)].items():
            file.put(path, changed)

    def write(self, name: str, file: Writing) -> None:
        fit = [word for word, value in self.cases.items() if all(file.says(*change) for change in value.items())]
        file.put(name, value_of(first_word(fit, name, self.cases)))

    def pass_over(self, name: str, file: Reading) -> None:
        value = file.present(name).get("")
        if self.idle is not None and value is not None:
            known_word(name, value, [case_of(idle) for idle in self.idle], file)

    def write_unread(self, name: str, file: Writing) -> None:
        if self.unread is not None:
            file.put(name, self.unread)


def known_word(name: str, value: Any, table: Collection[str], file: Reading) -> str:
    """Return the word of a table for the value of a field."""
    word = case_of(value)
    if word not in table:
        message = f"{quoted(name)} is {quoted(word)}, which {file.model_type} does not support here"
        raise Invalid("", message, notes=[f"allowed: {listing(table)}"])
    return word


def first_word(fit: list[str], name: str, table: Collection[str]) -> str:
    """Return the first word that expresses the value of a spec. Raise `Invalid` if no word does."""
    if not fit:
        message = f"no value of {quoted(name)} expresses the value of the spec"
        raise Invalid("", message, notes=[f"allowed: {', '.join(table)}"])
    return fit[0]


class LabelsConfig(FieldConfig):
    """The names of the classes by their numbers, `id2label`, as many as there are classes."""

    kind: Literal["labels"] = "labels"
    labels: str
    """The path of the classifier."""

    def read(self, name: str, file: Reading) -> None:
        labels, count = file.present(name).get(""), file.present("num_labels").get("", DEFAULT_CLASSES)
        names = _in_order(labels) if labels is not None else _numbered(count)
        file.put(f"{self.labels}.n_classes", len(names))
        if names != _numbered(len(names)):
            file.put(f"{self.labels}.labels", names)

    def write(self, name: str, file: Writing) -> None:
        labels = file.value(f"{self.labels}.labels") or _numbered(file.value(f"{self.labels}.n_classes"))
        file.put(name, {str(number): label for number, label in enumerate(labels)})
        file.put("label2id", {label: number for number, label in enumerate(labels)})


def _numbered(count: Any) -> list[str]:
    """Return the default names of classes."""
    if type(count) is not int or not 0 < count < 1e6:
        raise Invalid("", f"`num_labels` must be a number of classes; got {quoted(str(count))}")
    return [f"LABEL_{number}" for number in range(count)]


def _in_order(labels: Any) -> list[str]:
    names = {str(key): label for key, label in labels.items()} if isinstance(labels, dict) else {}
    numbers = list(map(str, range(len(names))))
    if not names or sorted(names) != sorted(numbers) or not all(isinstance(label, str) for label in names.values()):
        message = (
            f"the classes are not numbered from 0 to {len(names) - 1}, each with a name"
            if names
            else "the value must be a mapping of numbers to names"
        )
        raise Invalid("", message, help='write `{"0": "negative", "1": "positive"}`')
    return [names[number] for number in numbers]


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
                if isinstance(changes, Mapping) and "ffn" in changes and not _keeps_kind(changes["ffn"]):
                    _apply(f"{stack}.layers.variants.{variant}{FFN}", changes["ffn"], activation, file)

    def write(self, name: str, file: Writing) -> None:
        paths = [location for path in self.paths for location in (path, *_in_variants(path, file))]
        values = {path: value for path in paths if (value := file.value(path)) not in (None, ABSENT)}
        kinds = {path: value.kind_name() if isinstance(value, Component) else "" for path, value in values.items()}

        def fits(word: str) -> bool:
            placed = (_placed(path, kind, ACTIVATIONS[word]) for path, kind in kinds.items())
            return word not in self.older and all(file.says(*location) for location in placed)

        words = [word for word in ACTIVATIONS if fits(word)]
        default = case_of(file.default(name))
        file.put(name, default if default in words else first_word(words, name, ACTIVATIONS))


def _keeps_kind(ffn: Any) -> bool:
    """Return True if the FFN of a variant changes only sizes, and has the kind and activation of the stack's."""
    return isinstance(ffn, Mapping) and "kind" not in ffn


def _in_variants(path: str, file: Writing) -> list[str]:
    """Return the paths of the FFN in the variants of its stack."""
    variants = file.value(f"{path.removesuffix(FFN)}.layers.variants") if path.endswith(FFN) else None
    names = variants if isinstance(variants, Mapping) else {}
    return [f"{path.removesuffix(FFN)}.layers.variants.{name}{FFN}" for name in names]


def _apply(path: str, value: Any, activation: dict[str, Any], file: Reading) -> None:
    """Set the activation of the component at a path; `value` is its mapping."""
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
    if kind in (*UNGATED_KINDS, "mlp"):
        return path, activation if activation["kind"] in UNGATED_KINDS else {"kind": "mlp", "activation": activation}
    return f"{path}{SLOT}", activation

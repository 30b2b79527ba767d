"""The field that names the classes of a classifier."""

from __future__ import annotations

from typing import Any, Literal

from tfkit.component import FieldConfig, Reading, Writing
from tfkit.errors import Invalid, quoted

USUAL = 2
"""The number of classes where a config.json says nothing of them."""


class LabelsConfig(FieldConfig):
    """The names of the classes by their numbers, `id2label`, as many as there are classes."""

    kind: Literal["labels"] = "labels"
    labels: str
    """The path of the classifier."""

    def read(self, name: str, file: Reading) -> None:
        labels, count = file.given(name).get(""), file.given("num_labels").get("", USUAL)
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
        raise Invalid("", f"`num_labels` is {quoted(str(count))}, not a number of classes")
    return [f"LABEL_{number}" for number in range(count)]


def _in_order(labels: Any) -> list[str]:
    names = {str(key): label for key, label in labels.items()} if isinstance(labels, dict) else {}
    numbers = list(map(str, range(len(names))))
    if not names or sorted(names) != sorted(numbers) or not all(isinstance(label, str) for label in names.values()):
        message = f"the classes are not numbered from 0 to {len(names) - 1}, each with a name" if names else "not names"
        raise Invalid("", message, help='write `{"0": "negative", "1": "positive"}`')
    return [names[number] for number in numbers]

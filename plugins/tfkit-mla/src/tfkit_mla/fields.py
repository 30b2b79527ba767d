"""A field of config.json in GLM's models with an index: layers that reuse the choice of an earlier layer."""

from __future__ import annotations

from typing import Any, Literal

import tfkit
from tfkit import FieldConfig, Reading, Writing


class SharedIndexConfig(FieldConfig):
    """A list of the layers: `full` has an index, `shared` reuses the choice of the last earlier index."""

    kind: Literal["shared_index"] = "shared_index"
    shared_index: dict[str, str]
    """The variant of a layer that reuses a choice, by the variant that an earlier field set."""
    at: str
    """The path of the stack."""

    def read(self, name: str, file: Reading) -> None:
        types, layers = file.value(name), file.layers(self.at)
        if layers is None:
            return
        if types is None:
            types = _scheduled(file, len(layers))
        if not isinstance(types, list) or len(types) != len(layers) or not {"full", "shared"}.issuperset(types):
            message = f"`{name}` must be a list of {len(layers)} types, each full or shared; got `{types}`"
            raise tfkit.Invalid("", message)
        if types[0] == "shared":
            raise tfkit.Invalid("", "the first layer must be full: no earlier layer has an index")
        pairs = zip(types, layers, strict=True)
        file.arrange(self.at, [self.shared_index[layer] if type == "shared" else layer for type, layer in pairs])
        file.put(f"{self.at}.attention.index_name", "index" if "shared" in types else None)

    def write(self, name: str, file: Writing) -> None:
        shared = self.shared_index.values()
        file.put(name, ["shared" if layer in shared else "full" for layer in file.layers(self.at)])


def _scheduled(file: Reading, n_layers: int) -> list[str]:
    """Return the types that follow from the distance between two indices and the layer of the second index."""
    distance, offset = (_number(file, name, usual) for name, usual in (("topk_freq", 1), ("skip_topk_offset", 2)))
    return ["shared" if max(i - offset + 1, 0) % distance else "full" for i in range(n_layers)]


def _number(file: Reading, name: str, usual: int) -> int:
    value: Any = file.present(f"index_{name}").get("", usual)
    if type(value) is not int or value < 1:
        raise tfkit.Invalid("", f"`index_{name}` must be a positive integer; got {value}")
    return value

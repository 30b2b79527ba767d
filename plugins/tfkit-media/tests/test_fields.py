"""Fields of config.json that are numbers of layers and of patches."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tfkit_media.fields import FeatureLayerConfig, MergedConfig

import tfkit

LAYER = FeatureLayerConfig(feature_layer="encoder.n_layers", layers="layers")
MERGED = MergedConfig(merged="merged.size", image="image", patch="patch")


def read(field: Any, **values: Any) -> Any:
    """Return the value that a field named `x` puts into the spec."""
    result: dict[str, Any] = {}
    field.read("x", SimpleNamespace(value=values.get, put=result.__setitem__))
    return result[field.feature_layer if field is LAYER else field.merged]


@pytest.mark.parametrize(("x", "layers"), [(-1, 7), (-3, 5), ([-2], 6), (7, 7), (4, 4)])
def test_a_layer_may_be_counted_from_the_end(x: object, layers: int) -> None:
    assert read(LAYER, x=x, layers=7) == layers


@pytest.mark.parametrize("x", [[-2, -1], [], 8, 0, -8, "last", None])
def test_other_layers_are_refused(x: object) -> None:
    with pytest.raises(tfkit.Invalid, match="`x` must be"):
        read(LAYER, x=x, layers=7)


@pytest.mark.parametrize(("x", "size"), [(16, 3), (144, 1), (4, 6), (1, 12)])
def test_merged_patches_are_squares(x: int, size: int) -> None:
    assert read(MERGED, x=x, image=24, patch=2) == size


@pytest.mark.parametrize("x", [25, 64, 12, 0, 4.0])
def test_vectors_that_no_squares_give_are_refused(x: object) -> None:
    with pytest.raises(tfkit.Invalid, match="`x` must be"):
        read(MERGED, x=x, image=24, patch=2)

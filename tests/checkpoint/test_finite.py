"""Weights that are infinite or NaN, in a file or after conversion to the dtype of the model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tfkit.checkpoint import files
from tfkit.checkpoint.files import DTYPES, check_finite, is_finite, not_finite
from tfkit.errors import SpecError


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", [item for item in DTYPES.values() if item.is_floating_point or item.is_complex])
def test_numbers_that_are_none(dtype: torch.dtype, value: float) -> None:
    tensor = torch.ones(3, 4).to(dtype)
    check_finite("w", tensor, Path("f.safetensors"))
    check_finite("w", tensor[:0], Path("f.safetensors"))
    if not torch.tensor(value).to(dtype).to(torch.complex64).isfinite():
        tensor[1, 2] = tensor[2, 0] = value
        with pytest.raises(SpecError) as error:
            check_finite("w", tensor, Path("f.safetensors"))
        text = "nan" if dtype == torch.float8_e4m3fn else value
        assert str(error.value) == (
            "error: tensor `w` of `f.safetensors` has values that are infinite or NaN\n"
            f"   = 2 in total; the first is {text} at [1, 2]"
        )


def test_the_first_of_many_values_that_is_not_finite_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "CHUNK", 5)
    tensor = torch.zeros(3, 7)
    tensor[2, 6] = torch.inf
    with pytest.raises(SpecError, match=r"the first is inf at \[2, 6\]"):
        check_finite("w", tensor, Path("f"))
    tensor[0, 6] = tensor[1, 4] = -torch.inf
    with pytest.raises(SpecError, match=r"3 in total; the first is -inf at \[0, 6\]"):
        check_finite("w", tensor, Path("f"))
    with pytest.raises(SpecError, match=r"the first is nan at \[\]"):
        check_finite("w", torch.tensor(torch.nan), Path("f"))
    check_finite("w", torch.tensor([2**31 - 1, -5]), Path("f"))


def test_values_beyond_the_type_of_the_model() -> None:
    tensor = torch.tensor([[1.0, 65504.0], [65519.0, 65520.0]])
    check_finite("w", tensor, Path("f"), torch.bfloat16)
    check_finite("w", tensor[:, :1], Path("f"), torch.float16)
    with pytest.raises(SpecError) as error:
        check_finite("w", tensor, Path("f"), torch.float16)
    assert str(error.value) == (
        "error: tensor `w` of `f` has values beyond float16\n"
        "   = 1 in total; the first is 65520.0 at [1, 1]\n"
        "   = help: use float32, the type of the file"
    )
    assert torch.equal(tensor.to(torch.float16).isfinite(), tensor < 65520)
    assert is_finite(-tensor)
    assert not is_finite(-tensor, torch.float16)


def test_tensors_that_are_not_finite_are_named() -> None:
    state = {"a": torch.ones(2), "n": torch.arange(3), "b": torch.tensor([0.0, torch.nan])}
    assert not_finite(state) == "in `b`"
    assert not_finite({**state, "b": state["a"]}) is None

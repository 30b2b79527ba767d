"""The property `eject` of `tfkit check`: an ejected file returns the outputs of the model."""

from __future__ import annotations

from collections.abc import Iterator

from tfkit.tools.check.measure import Deviation, property_of
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.forms import write_errors
from tfkit.tools.eject.proof import check
from tfkit.tools.eject.write import eject


@property_of("eject", "is written out as plain PyTorch", level="full", of_spec=True)
def ejected(subject: ModelUnderTest) -> Iterator[Deviation]:
    """The file that `tfkit eject` writes returns bit-identical outputs without tfkit."""
    yield from write_errors(lambda: check(subject.graph, eject(subject.graph)))

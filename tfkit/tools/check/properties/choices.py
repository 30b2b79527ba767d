"""Properties of components that choose keys or experts by a score."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from functools import cached_property

import torch
from torch import fx

from tfkit.component import SublayerConfig
from tfkit.tools.check.measure import Deviation, DoesNotApplyError, property_of, require
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.properties.numbers import reference_agreement
from tfkit.tools.check.properties.reading import padding_independence
from tfkit.tools.check.properties.steps import cached_steps


class ModelWithEqualScores(ModelUnderTest):
    """A model in which all rows but the first are zero in each of the parameters that compute scores."""

    @cached_property
    def model(self) -> fx.GraphModule:
        model = self.build()
        with torch.no_grad():
            for name in score_parameters(model):
                model.get_parameter(name)[1:] = 0.0
        return model


def score_parameters(model: fx.GraphModule) -> list[str]:
    """Return the parameters that compute the scores by which tokens choose keys or experts."""
    components = model.meta["components"].items()
    sublayers = ((path, part) for path, part in components if isinstance(part, SublayerConfig))
    names = [f"{path}.{name}" for path, part in sublayers for name in part.score_parameters]
    parameters = dict(model.named_parameters())
    return [name for name in names if name in parameters]


@property_of("equal-scores", "chooses among equal scores by position", follows=("padding", "cached", "meaning"))
def equal_scores(subject: ModelUnderTest) -> Iterator[Deviation]:
    """Decoding, padded rows and the reference choose equally if many keys or experts have equal scores."""
    require(score_parameters(subject.model), "no component chooses keys or experts")
    tied = ModelWithEqualScores(**{field.name: getattr(subject, field.name) for field in fields(subject)})
    for measured in (cached_steps, padding_independence, reference_agreement):
        try:
            for deviation in measured.measure(tied):
                yield replace(deviation, detail=f"with equal scores: {deviation.detail}")
        except DoesNotApplyError:
            continue

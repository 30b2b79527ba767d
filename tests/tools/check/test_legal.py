"""Random legal specs have every property."""

from __future__ import annotations

import json
import os
import random

import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

import tfkit
from tfkit.tools.check.model_under_test import ModelUnderTest
from tfkit.tools.check.reduced import reduced_model

from .legal import PLUGINS, Data, changes, specs
from .models import faults

QUICK_PROPERTIES = ("look-ahead", "extents", "padding", "neighbours", "meaning", "zero-sublayers")
SEED = int(os.environ.get("TFKIT_LEGAL_SEED", random.randrange(10**6)))
"""Seed of the random specs. A failure prints it; the variable repeats the failure."""
SETTINGS = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def check(spec: Data, only: tuple[str, ...] = ()) -> None:
    graph = reduced_model(tfkit.load(spec, plugins=PLUGINS), PLUGINS).graph
    broken = faults(ModelUnderTest(graph, PLUGINS), only)
    assert not broken, f"TFKIT_LEGAL_SEED={SEED} draws a spec without {broken}: {json.dumps(spec)}"


@pytest.mark.slow
@settings(SETTINGS, max_examples=3, derandomize=True)
@given(specs())
def test_random_specs_have_the_properties_of_reading(spec: Data) -> None:
    check(spec, QUICK_PROPERTIES)


@settings(SETTINGS, max_examples=5, derandomize=True)
@given(st.data())
def test_changes_are_drawn_for_every_slot(data: st.DataObject) -> None:
    assert all(isinstance(change, dict) for change in changes(data.draw))


@pytest.mark.slow
@seed(SEED)
@settings(SETTINGS, max_examples=25)
@given(specs())
def test_random_specs_have_every_property(spec: Data) -> None:
    check(spec)

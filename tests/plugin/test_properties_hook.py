"""Properties and subjects of plugins: the hook `tfkit_properties`."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from tfkit.errors import SpecError
from tfkit.tools.check.check import Work
from tfkit.tools.check.properties.all import PropertySet, properties_of

from .written import load, write

SUBJECT = '''
from dataclasses import dataclass
from typing import ClassVar

import tfkit

@dataclass
class Corpus:
    """Texts that are checked."""

    words: str
    of: ClassVar[str] = "corpus"
    name: ClassVar[str] = "texts"
    graph: ClassVar[None] = None
    notes: ClassVar[tuple] = ()

class CorpusSubject(tfkit.SubjectType):
    name = "corpus"
    slots = ("corpus",)
    further_slots = ("reader",)

    def read(self, spec, plugins, *, sets=(), seed=0, kinds=None):
        return Corpus(spec)

    def around(self, config, plugins, *, options, fields=None, seed=0, reference=None):
        return {"a corpus": Corpus("small")}

def long(subject):
    """A text has at least five letters."""
    yield tfkit.Deviation(max(0.0, 5.0 - len(subject.words)), "it is short")

LENGTH = tfkit.Property("long", "has at least five letters", long, of="corpus")
'''
HOOK = "\n@tfkit.hookimpl\ndef tfkit_properties():\n"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def properties(body: str) -> PropertySet:
    write("mine.py", f"{SUBJECT}{HOOK}    {body}\n")
    return properties_of(load("mine.py"))


def test_a_subject_is_measured_by_its_properties() -> None:
    write("mine.py", f"{SUBJECT}{HOOK}    return [LENGTH, CorpusSubject()]\n")
    work = Work(load("mine.py"))
    assert (work.types, work.left("corpus")) == (("model", "run", "corpus"), 0)
    statuses = {}
    for text in ("ab", "abcdef"):
        subject = work.of_document("corpus", text, ())
        (outcome,) = work.check((subject, subject.words)).outcomes
        statuses[text] = (outcome.name, outcome.status, outcome.worst)
    assert statuses == {"ab": ("long", "failed", 3.0), "abcdef": ("long", "ok", 0.0)}


def test_a_slot_leads_to_its_subject() -> None:
    actual = properties("return [CorpusSubject(), LENGTH]")
    names = [None if item is None else item.name for item in map(actual.type_of, ("ffn", "optimizer", "corpus"))]
    assert names == [None, "run", "corpus"]
    assert actual.slots[-1] == "corpus"
    assert "reader" not in actual.slots


def test_a_plugin_adds_a_property_of_the_subject_of_another_plugin() -> None:
    actual = properties("return [tfkit.Property('mine', 'is mine', long, of='run')]")
    assert [prop.name for prop in actual.chosen() if prop.of == "run"][-2:] == ["digest", "mine"]
    assert actual.faults == ()


def test_properties_without_a_subject_are_omitted_with_a_warning() -> None:
    actual = properties("return [tfkit.Property('mine', 'is mine', long, of='runs'), LENGTH]")
    assert {"mine", "long"}.isdisjoint(prop.name for prop in actual.properties)
    assert [str(SpecError(fault)) for fault in actual.faults] == [
        inspect.cleandoc("""
            error: property `mine` of plugin mine.py is omitted: no plugin has the subject `runs`
               = known: model, run
               = help: a subject with a similar name exists: `run`
        """),
        inspect.cleandoc("""
            error: property `long` of plugin mine.py is omitted: no plugin has the subject `corpus`
               = known: model, run
        """),
    ]


@pytest.mark.parametrize(
    ("body", "clash", "owner"),
    [
        ("return [tfkit.Property('padding', 'is mine', long)]", "two properties have the name `padding`", "tfkit"),
        ("return [tfkit.Property('decay', 'is mine', long)]", "two properties have the name `decay`", "built in"),
        ("CorpusSubject.name = 'run'; return [CorpusSubject()]", "two subjects have the name `run`", "built in"),
        ("CorpusSubject.name = 'model'; return [CorpusSubject()]", "two subjects have the name `model`", "tfkit"),
        ("CorpusSubject.slots = ('loss',); return [CorpusSubject()]", "two subjects have the slot `loss`", "built in"),
        ("CorpusSubject.slots = ('ffn',); return [CorpusSubject()]", "two subjects have the slot `ffn`", "tfkit"),
    ],
)
def test_a_name_or_slot_of_two_plugins_names_both(body: str, clash: str, owner: str) -> None:
    with pytest.raises(SpecError) as caught:
        properties(body)
    assert str(caught.value) == inspect.cleandoc(f"""
        error: {clash}
           = from {owner}
           = from mine.py
           = help: switch one plugin off by its name: TFKIT_DISABLE=<name>
    """)


def test_a_hook_that_returns_anything_else_is_skipped() -> None:
    actual = properties("return [LENGTH, CorpusSubject]")
    (fault,) = actual.faults
    assert fault.message == (
        "plugin mine.py: `tfkit_properties` must return objects of tfkit.Property and tfkit.SubjectType; "
        "got the class CorpusSubject"
    )
    assert list(actual.types) == ["run"]

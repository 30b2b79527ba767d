"""The texts below the fields of a config, read from its source."""

from tfkit.component import Config, FFNConfig, MaskConfig
from tfkit.plugin.registry import field_docs


class Base(Config):
    first: int
    """The first,
    on two lines."""
    second: int = 2
    """The second."""
    third: int = 3


class Derived(Base):
    second: int = 5
    """Another second."""
    fourth: int = 4

    class Inner(Config):
        first: int
        """Inside."""


def test_texts_of_a_class():
    assert field_docs(Base) == {"first": "The first,\non two lines.", "second": "The second."}


def test_texts_are_inherited_and_replaced():
    assert field_docs(Derived) == {"first": "The first,\non two lines.", "second": "Another second."}


def test_classes_inside_others():
    class Local(Config):
        here: int
        """Within a function."""

    assert field_docs(Derived.Inner) == {"first": "Inside."}
    assert field_docs(Local) == {"here": "Within a function."}


def test_the_contract_s_own():
    assert field_docs(MaskConfig)["right"] == "Number of keys after the query's position."
    assert field_docs(FFNConfig)["d_model"] == "Width of the residual stream."


def test_a_class_without_source_has_none():
    names = {"Config": Config, "__name__": "no_such_module"}
    exec("class Bare(Config):\n    size: int\n    'How large.'", names)
    assert field_docs(names["Bare"]) == {}

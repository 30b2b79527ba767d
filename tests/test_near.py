"""The tests that `make test-near` runs: those that a difference concerns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.near import Difference, mirror, near

SECONDS = {
    "tests/spec/test_merge.py::test_lists": 0.2,
    "tests/spec/test_source.py::test_quotes": 0.3,
    "tests/spec/test_source.py::test_long_texts": 7.0,
    "tests/families/test_families.py::test_a_published_model_is_exactly_this[minimax]": 1.5,
    "tests/families/test_heads.py::test_heads[minimax-text]": 0.4,
    "tests/families/test_heads.py::test_heads[minimax_m2-text]": 2.5,
    "tests/components/test_rope_scaling.py::test_pairs[rope_interleaved-1]": 0.1,
    "tests/components/test_rope_scaling.py::test_pairs[rope-1]": 0.8,
    "tests/reference/test_options.py::test_an_option[gqa-rope]": 0.7,
    "plugins/tfkit-moe/tests/test_moe.py::test_router": 0.9,
}
SPEC = {"test_source.py::test_quotes", "test_source.py::test_long_texts", "test_merge.py::test_lists"}


def chosen(lines: dict[str, str], budget: float = 100.0) -> set[str]:
    """Return the near tests without their files."""
    tests, _ = near([*reversed(SECONDS.items())], Difference(lines), budget)
    return {test.rpartition("/")[2] for test in tests}


@pytest.mark.parametrize(
    ("file", "tests"),
    [
        ("tfkit/spec/source.py", SPEC),
        (
            "specs/families/minimax.yaml",
            {
                "test_families.py::test_a_published_model_is_exactly_this[minimax]",
                "test_heads.py::test_heads[minimax-text]",
            },
        ),
        (
            "tfkit/components/rope.py",  # its tests, and the tests of the kind `rope`
            {
                "test_rope_scaling.py::test_pairs[rope_interleaved-1]",
                "test_rope_scaling.py::test_pairs[rope-1]",
                "test_options.py::test_an_option[gqa-rope]",
            },
        ),
        ("plugins/tfkit-moe/src/tfkit_moe/router.py", {"test_moe.py::test_router"}),
        ("tests/spec/test_merge.py", {"test_merge.py::test_lists"}),
        ("tests/spec/conftest.py", SPEC),
        ("tests/models.py", set()),
        ("README.md", set()),
    ],
)
def test_a_changed_file_concerns(file: str, tests: set[str]) -> None:
    assert chosen({file: ""}) == tests


@pytest.mark.parametrize(
    ("helper", "test"),
    [("tests/spec/texts.py", "tests/spec/test_source.py"), ("tests/texts.py", "tests/cli/test_app.py")],
)
def test_a_changed_helper_concerns_the_tests_that_import_it(helper: str, test: str) -> None:
    tests = [(f"{test}::test_quotes", 1.5), ("tests/spec/test_merge.py::test_lists", 0.5)]
    assert near(tests, Difference({helper: ""}), 9)[0] == {f"{test}::test_quotes"}


def test_a_changed_case_concerns_the_tests_with_its_name() -> None:
    assert chosen({"tests/families/more_cases.py": '    "minimax_m2": Case(\n'}) == {
        "test_heads.py::test_heads[minimax_m2-text]"
    }
    assert chosen({"tests/planted.yaml": '  old: "minimax_m2"\n'}) == set()  # quotes code


def test_a_golden_file_concerns_the_tests_that_quote_its_name() -> None:
    tests = [("tests/test_help.py::test_a", 1.0), ("tests/test_near.py::test_a", 1.0)]
    name = "of/this/test"  # the quote
    assert near(tests, Difference({f"tests/golden/{name}.txt": ""}), 9)[0] == {"tests/test_near.py::test_a"}


@pytest.mark.parametrize(
    ("lines", "budget", "tests", "count"),
    [
        (  # a mirrored file, then a name, then the folder; at each distance what is quick
            {"tfkit/spec/source.py": "", "specs/families/minimax.yaml": ""},
            1.0,
            {"test_source.py::test_quotes", "test_heads.py::test_heads[minimax-text]", "test_merge.py::test_lists"},
            2,
        ),
        (  # a name that is rare
            {"tests/families/more_cases.py": '"text": ["minimax_m2"]'},
            2.6,
            {"test_heads.py::test_heads[minimax_m2-text]"},
            1,
        ),
        (  # a mirrored file, even if a slow test of it has a name
            {"tfkit/components/rope.py": ""},
            1.0,
            {"test_rope_scaling.py::test_pairs[rope_interleaved-1]", "test_rope_scaling.py::test_pairs[rope-1]"},
            1,
        ),
    ],
)
def test_a_budget_drops_what_is_far_or_slow(lines: dict[str, str], budget: float, tests: set[str], count: int) -> None:
    assert chosen(lines, budget) == tests
    assert len(near([*SECONDS.items()], Difference(lines), budget)[1]) == count


def test_mirrored_folders() -> None:
    assert mirror(Path("tfkit/tools/cost/counter.py")) == Path("tests/tools/cost")
    assert mirror(Path("plugins/tfkit-moe/src/tfkit_moe/router.py")) == Path("plugins/tfkit-moe/tests")
    assert mirror(Path("tools/near.py")) == Path("tests")

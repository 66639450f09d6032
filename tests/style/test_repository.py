"""The list of exceptions can only shrink, and cannot hide a new finding."""

import pytest
from repository import Finding, allowances, tracked_files, verdict

RULES = ("file_lines",)


def finding(value: int) -> Finding:
    return Finding("file_lines", "a.py", value, f"{value} lines")


def test_a_finding_without_an_entry_is_a_problem() -> None:
    assert verdict(RULES, [finding(500)], {}) == ["a.py: 500 lines"]


def test_a_finding_that_matches_its_entry_is_no_problem() -> None:
    assert verdict(RULES, [finding(500)], {("file_lines", "a.py"): 500}) == []


@pytest.mark.parametrize("value", [499, 501])
def test_an_entry_that_is_not_exact_is_a_problem(value: int) -> None:
    assert len(verdict(RULES, [finding(value)], {("file_lines", "a.py"): 500})) == 1


def test_an_entry_that_nothing_needs_is_a_problem() -> None:
    assert verdict(RULES, [], {("file_lines", "a.py"): 500}) == [
        "a.py: remove its entry for file_lines, it is fine"
    ]


def test_entries_of_other_rules_are_left_to_their_own_test() -> None:
    assert verdict(RULES, [], {("parameters", "a.py:f"): 7}) == []


def test_an_entry_needs_a_reason() -> None:
    assert allowances("file_lines a.py 500  # generated\n") == {("file_lines", "a.py"): 500}
    with pytest.raises(ValueError, match="reason"):
        allowances("file_lines a.py 500\n")


def test_this_very_file_is_among_the_files_that_are_looked_at() -> None:
    assert "tests/style/test_repository.py" in tracked_files(".py")
    assert "tests/style/test_repository.py" not in tracked_files(".py", under="hpkv_sglang")

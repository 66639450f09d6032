"""No machine's paths, no registry hosts, no dead links, no empty names; the README's flag table."""

from pathlib import Path

import pytest
from repository import ROOT, Finding, allowed_exceptions, source_of, tracked_files, verdict
from text_rules import link_findings, name_findings, reference_findings

from hpkv_sglang.config import FLAGS, flags_markdown


def judged(rule: str, findings: list[Finding]) -> list[str]:
    return verdict((rule,), findings, allowed_exceptions())


def test_no_file_names_a_machine_or_a_package_registry() -> None:
    findings = []
    for path in tracked_files():
        try:
            text = source_of(path)
        except UnicodeDecodeError:
            continue  # a picture or another binary file
        findings += reference_findings(path, text)
    assert judged("machine_reference", findings) == []


@pytest.mark.parametrize(
    "pieces",
    [
        ("see /wor", "k/x"),
        ("/roo", "t/.cache"),
        ("--index-", "url x"),
        ("https://py", "pi.org/simple"),
        ("/home/", "me/x"),
    ],
)
def test_the_reference_rule_sees_each_kind(pieces: tuple[str, str]) -> None:
    assert reference_findings("a.md", "".join(pieces)) != []


def test_the_reference_rule_accepts_words_that_only_look_alike() -> None:
    text = "".join(("csrc/wor", "k/x.h the tree's roo", "t/ and /dev/shm"))
    assert reference_findings("a.md", text) == []


def test_files_are_named_after_what_they_hold() -> None:
    assert judged("file_name", [f for path in tracked_files() for f in name_findings(path)]) == []


@pytest.mark.parametrize("path", ["a/utils.py", "a/pool_manager.h", "common.cc", "a/my_util.py"])
def test_the_name_rule_sees_an_empty_name(path: str) -> None:
    assert name_findings(path) != []
    assert name_findings("a/utilization.py") == []


def test_links_between_pages_lead_somewhere() -> None:
    pages = tracked_files(".md")
    assert "README.md" in pages
    findings = [f for path in pages for f in link_findings(path, source_of(path), ROOT)]
    assert judged("link", findings) == []


def test_the_link_rule_sees_a_dead_link_and_a_dead_heading(tmp_path: Path) -> None:
    (tmp_path / "b.md").write_text("# A heading, `coded`\n", encoding="utf-8")
    good = "[b](b.md) [b](b.md#a-heading-coded) [w](https://example.com/x) ```[n](no.md)```"
    assert link_findings("a.md", good, tmp_path) == []
    for bad in ("[c](c.md)", "[b](b.md#other)", '<img src="c.svg">'):
        assert [f.rule for f in link_findings("a.md", bad, tmp_path)] == ["link"]


def test_the_readme_shows_the_flag_table_of_config() -> None:
    assert flags_markdown() in source_of("README.md")


def test_the_flag_table_has_a_row_for_every_flag() -> None:
    rows = flags_markdown().splitlines()[2:]
    assert len(rows) == len(FLAGS)
    for flag, row in zip(FLAGS, rows, strict=True):
        assert row.startswith(f"| `{flag.name}` |") and flag.environment in row

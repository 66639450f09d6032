"""Rules about all tracked text: what it may point at, and how files are named."""

from __future__ import annotations

import re
from pathlib import Path

from repository import Finding

# Written in pieces, so that this file does not break its own rules.
_MACHINE_PATHS = (
    r"(?<![\w.-])/wor" + r"k/",
    r"(?<![\w.-])/far" + r"m/",
    r"(?<![\w.-])/roo" + r"t/",
    r"(?<![\w.-])/home/" + r"[a-z]",
    r"/tmp/h-" + r"[a-z]",
    r"/opt/(?:wheels|py" + r"pi)",
)
_REGISTRIES = (
    r"py" + r"pi\.org",
    r"python" + r"hosted\.org",
    r"npm" + r"js\.org",
    r"deb\.debian" + r"\.org",
    r"(?:extra-)?index-" + r"url",
    r"find-" + r"links",
)
_FORBIDDEN = {
    "a path of one machine": "|".join(_MACHINE_PATHS),
    "the host of a package registry": "|".join(_REGISTRIES),
}
_NAMES = re.compile(r"(?:^|[_/])(utils?|commons?|managers?|helpers?|misc)(?:[_.]|$)")


def reference_findings(path: str, text: str) -> list[Finding]:
    """Machine paths and registry hosts."""
    findings = []
    for what, pattern in _FORBIDDEN.items():
        for number, line in enumerate(text.splitlines(), start=1):
            found = re.search(pattern, line)
            if found:
                seen = f"line {number} names {what}: {found[0]}"
                findings.append(Finding("machine_reference", path, 0, seen))
    return findings


def name_findings(path: str) -> list[Finding]:
    """Files named after nothing in particular."""
    found = _NAMES.search(Path(path).name)
    return [Finding("file_name", path, 0, f"'{found[1]}' says nothing")] if found else []


def _anchors(markdown: str) -> set[str]:
    """The anchors of a page's headings, spelled as the usual web views do."""
    headings = re.findall(r"^#{1,6}\s+(.*)$", markdown, re.MULTILINE)
    plain = [re.sub(r"[^\w\- ]", "", h.replace("`", "")).strip().lower() for h in headings]
    return {h.replace(" ", "-") for h in plain}


def link_findings(path: str, text: str, root: Path) -> list[Finding]:
    """Relative links of a Markdown page that lead nowhere. Web links are not followed."""
    findings = []
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    targets = re.findall(r"\]\(([^)\s]+)\)", prose)
    targets += re.findall(r"<img[^>]*\bsrc=[\"']([^\"']+)[\"']", prose)
    for target in targets:
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        page = (root / path).parent / name if name else root / path
        if not page.exists():
            findings.append(Finding("link", path, 0, f"{target} does not exist"))
        elif anchor and anchor not in _anchors(page.read_text(encoding="utf-8") if name else text):
            findings.append(Finding("link", path, 0, f"{target}: no such heading"))
    return findings

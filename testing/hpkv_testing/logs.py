"""What of a server's log a person needs to see.

SGLang prints lines of many kilobytes and, on a failure, one traceback per process; the telling
lines are the last errors, not the last lines.
"""

import re
import textwrap

_LINE_WIDTH = 300
_TERMINAL_WIDTH = 70
_STAMPED = re.compile(r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[^\]]*\] (.+)")
_TELLING = re.compile(r"(Error|Exception|error:|Traceback|ERROR|CRITICAL|assert|Killed)")


def excerpt(text: str, line_count: int = 30) -> str:
    """The last `line_count` lines, preceded by earlier lines that name an error, all cut short."""
    lines = [line for line in text.splitlines() if line.strip()]
    tail = lines[-line_count:]
    earlier = [line for line in lines[:-line_count] if _TELLING.search(line)][-10:]
    return "\n".join(_cut(line, _LINE_WIDTH) for line in [*earlier, *tail])


def last_line(text: str) -> str:
    """The last line with a time in front, without the time, cut to a terminal's width."""
    for line in reversed(text.splitlines()):
        stamped = _STAMPED.match(line)
        if stamped:
            return textwrap.shorten(stamped[1], _TERMINAL_WIDTH, placeholder=" ...")
    return "(no log line yet)"


def _cut(line: str, width: int) -> str:
    return line if len(line) <= width else f"{line[:width]} [{len(line) - width} more]"

"""The messages that docs/how-to/operate.md quotes: a test that produces one asks here whether it is quoted as it is."""

from __future__ import annotations

import re
from pathlib import Path

GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "operate.md"
ROW = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def quoted() -> list[str]:
    """The messages in the guide, in its order."""
    return ROW.findall(GUIDE.read_text().partition("## Error messages")[2])


def is_quoted(text: str) -> bool:
    """Whether the text has one of the guide's messages, whose numbers, addresses and names are examples."""
    return any(_pattern(message).search(" ".join(text.split())) for message in quoted())


def _pattern(message: str) -> re.Pattern[str]:
    """`...` stands for anything; a number, an address, a name in quotes and a pool for any other one."""
    escaped = re.escape(message).replace(re.escape("..."), ".*?")
    escaped = re.sub(r"'[a-z]+'", r"'[^']+'", escaped)
    escaped = re.sub(r"\\\((prefill|decode)\\\)", r"\\(\\w+\\)", escaped)
    escaped = re.sub(r"auto\\\)", r"[^)]+\\)", escaped)
    return re.compile(re.sub(r"(\d+\\\.)*\d+", r"(?:[\\w.-]*\\d[\\w.-]*)", escaped))

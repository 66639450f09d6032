"""What the demo talks about: Python's language reference, as the interpreter itself carries it."""

from dataclasses import dataclass
from pydoc_data.topics import topics

SYSTEM = (
    "You answer questions about a text from the reference manual of the Python language. "
    "Keep to what the text says, answer in one or two plain sentences, and do not repeat the "
    "question. When the text does not answer a question, say so."
)

# Sections of 5,000 to 10,000 characters that can be read on their own.
_SUBJECTS = (
    "try",
    "import",
    "strings",
    "calls",
    "execmodel",
    "comparisons",
    "assignment",
    "naming",
)

_QUESTIONS = (
    "What is this text about?",
    "Name one rule that the text states.",
    "What would a beginner get wrong here?",
)


@dataclass(frozen=True)
class Topic:
    """One conversation: a long text, and the questions asked about it in turn."""

    name: str
    text: str
    questions: tuple[str, ...]


def choose(count: int, characters: int) -> list[Topic]:
    """`count` topics, each text cut after a paragraph at about `characters`."""
    if not 1 <= count <= len(_SUBJECTS):
        raise ValueError(f"between 1 and {len(_SUBJECTS)} conversations, not {count}")
    return [Topic(name, _cut(topics[name], characters), _QUESTIONS) for name in _SUBJECTS[:count]]


def _cut(text: str, characters: int) -> str:
    if len(text) <= characters:
        return text.strip()
    end = text.rfind("\n\n", 0, characters)
    return text[: end if end > 0 else characters].strip()

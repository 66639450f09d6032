"""A conversation as the token sequence the model sees.

Invariant: `tokens` only grows, and the model's own output tokens are appended as they came, so each
prompt has the one before it, answer included, as a prefix. That is what a KV cache can reuse.
"""

from __future__ import annotations

from pathlib import Path

from tokenizers import Tokenizer

from demo.texts import SYSTEM, Topic
from hpkv_testing.client import Answer


class Dialogue:
    """One topic's questions and the answers so far; not thread-safe."""

    def __init__(self, topic: Topic, tokenizer: Tokenizer) -> None:
        self.topic = topic
        self.transcript: list[tuple[str, str]] = []
        self._tokenizer = tokenizer
        self._tokens = self._encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
        self._question = ""

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens up to where the model's next answer begins."""
        return tuple(self._tokens)

    def ask(self, question: str) -> None:
        """Append the user's turn; the first one brings the text."""
        body = question if self.transcript else f"{self.topic.text}\n\n{question}"
        self._tokens += self._encode(f"<|im_start|>user\n{body}<|im_end|>\n<|im_start|>assistant\n")
        self._question = question

    def record(self, answer: Answer) -> None:
        """Append the model's turn."""
        self._tokens += answer.output_ids
        self._tokens += self._encode("<|im_end|>\n")
        self.transcript.append((self._question, answer.text))

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def load_tokenizer(checkpoint: Path) -> Tokenizer:
    """The checkpoint's tokenizer; knows the marks between turns as single tokens."""
    return Tokenizer.from_file(str(checkpoint / "tokenizer.json"))

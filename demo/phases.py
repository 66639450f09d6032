"""The steps of the demo, each on servers that already run.

A measured request is the last turn of a conversation, asked one at a time. Its reference is the
same request as a device hit: the same cached length means the same matrix shapes, so the answer and
its logprobs must be equal to the bit, wherever the cached part came from.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from tokenizers import Tokenizer

from demo.dialogue import Dialogue
from demo.texts import Topic
from hpkv_testing.client import Answer, Ask
from hpkv_testing.server import Server

_TALK_TOKENS = 16  # a turn of the conversation
_MEASURED_TOKENS = 8

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Row:
    """The answers of one way to be served, one per conversation, and the tier it should show."""

    name: str
    tier: str
    answers: tuple[Answer, ...]


def talk(
    server: Server, topics: Sequence[Topic], tokenizer: Tokenizer, say: Progress
) -> tuple[list[Dialogue], list[Answer]]:
    """Hold all conversations at once, a turn of each in turn, up to the last question's answer.

    Returns them with the last question asked and unanswered, and all answers given on the way.
    """
    dialogues = [Dialogue(topic, tokenizer) for topic in topics]
    given: list[Answer] = []
    turn_count = len(topics[0].questions)
    for turn in range(turn_count):
        say(f"conversations: turn {turn + 1} of {turn_count}, {len(topics)} conversations in turn")
        for dialogue in dialogues:
            dialogue.ask(dialogue.topic.questions[turn])
            ask = Ask(input_ids=dialogue.prompt, max_new_tokens=_TALK_TOKENS, ignore_eos=False)
            answer = server.generate(ask)
            given.append(answer)
            if turn + 1 < turn_count:
                dialogue.record(answer)
            else:
                dialogue.transcript.append((dialogue.topic.questions[turn], answer.text))
    return dialogues, given


def measured(dialogue: Dialogue) -> Ask:
    """The last turn as a timed request of a fixed length."""
    return Ask(
        input_ids=dialogue.prompt,
        max_new_tokens=_MEASURED_TOKENS,
        return_logprob=True,
        stream=True,
    )


def cold(server: Server, dialogues: Sequence[Dialogue]) -> Row:
    """The same prompts under a salt nobody used, so that nothing of them is cached anywhere."""
    asks = [replace(measured(d), cache_salt=f"cold-{d.topic.name}") for d in dialogues]
    return Row("cold", "none", tuple(server.generate(ask) for ask in asks))


def device_hits(server: Server, dialogues: Sequence[Dialogue]) -> Row:
    """Each prompt right after itself: all full pages are still in the device pool."""
    answers = []
    for dialogue in dialogues:
        server.generate(input_ids=dialogue.prompt, max_new_tokens=1)
        answers.append(server.generate(measured(dialogue)))
    return Row("device", "device", tuple(answers))


def hits(name: str, tier: str, server: Server, dialogues: Sequence[Dialogue]) -> Row:
    """Each prompt once, in order: the others have pushed it out of the device pool meanwhile."""
    return Row(name, tier, tuple(server.generate(measured(d)) for d in dialogues))

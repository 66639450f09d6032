"""The demo's verdict: it must say no whenever the table does not show what the demo claims."""

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("tokenizers")
# At the end: the installed plugin must win over its sources beside the demo.
sys.path.append(str(Path(__file__).parents[2]))

from demo.dialogue import Dialogue
from demo.phases import Row
from demo.report import Report
from demo.texts import Topic, choose
from hpkv_testing.client import Answer


def answer(tiers: Mapping[str, int], output: tuple[int, ...] = (1, 2)) -> Answer:
    return Answer(
        output_ids=output,
        text="words",
        logprobs=(-0.5,) * len(output),
        prompt_tokens=100,
        cached_tokens=sum(tiers.values()),
        cached_tokens_details=dict(tiers),
        finish_reason="length",
        rid="r",
        ttft_s=0.1,
        elapsed_s=0.2,
    )


DEVICE, HOST = answer({"device": 64, "host": 0}), answer({"device": 0, "host": 64})
DISK = answer({"device": 0, "host": 0, "storage": 64})
GOOD = Report(
    cold=Row("cold", "none", (answer({}),)),
    device=Row("device hit", "device", (DEVICE,)),
    tiers=(
        Row("host hit", "host", (HOST,)),
        Row("second server", "host", (HOST,)),
        Row("disk hit", "storage", (DISK,)),
    ),
)


def test_equal_answers_from_every_tier_pass() -> None:
    assert GOOD.failures() == []


def test_a_device_part_beside_the_host_part_passes() -> None:
    mixed = Row("host hit", "host", (answer({"device": 16, "host": 48}),))
    assert replace(GOOD, tiers=(mixed,)).failures() == []


BAD_HOST_ANSWERS = {
    "another token": answer({"device": 0, "host": 64}, (1, 3)),
    "another logprob": replace(HOST, logprobs=(-0.5, -0.5000001)),
    "nothing from the host": DEVICE,
    "fewer cached tokens": answer({"device": 0, "host": 48}),
    "not cached at all": answer({}),
}


@pytest.mark.parametrize("bad", BAD_HOST_ANSWERS.values(), ids=BAD_HOST_ANSWERS)
def test_one_bad_host_answer_in_the_last_row_fails(bad: Answer) -> None:
    rows = (GOOD.tiers[0], Row("second server", "host", (bad,)))
    (failure, *_) = replace(GOOD, tiers=rows).failures()
    assert "second server, conversation 1" in failure


def test_a_disk_row_that_came_from_the_host_pool_fails() -> None:
    row = Row("disk hit", "storage", (HOST,))
    assert replace(GOOD, tiers=(row,)).failures() == [
        "disk hit, conversation 1: no token came from storage"
    ]


def test_a_cold_row_that_was_cached_fails() -> None:
    assert replace(GOOD, cold=Row("cold", "none", (HOST,))).failures()


@pytest.mark.parametrize("wrong", [HOST, answer({})], ids=["from the host", "not cached"])
def test_a_device_row_that_did_not_come_from_the_device_fails(wrong: Answer) -> None:
    report = replace(GOOD, device=Row("device hit", "device", (wrong,)))
    assert any(failure.startswith("device hit") for failure in report.failures())


def test_each_prompt_extends_the_one_before_by_the_models_own_tokens(tmp_path: Path) -> None:
    models = pytest.importorskip("hpkv_testing.models")
    models.byte_tokenizer().save_pretrained(tmp_path)
    from demo.dialogue import load_tokenizer

    dialogue = Dialogue(Topic("t", "text", ("a", "b")), load_tokenizer(tmp_path))
    dialogue.ask("a")
    first = dialogue.prompt
    dialogue.record(answer({}, (300, 301)))
    dialogue.ask("b")
    assert dialogue.prompt[: len(first) + 2] == (*first, 300, 301)


def test_texts_are_long_and_cut_at_a_paragraph() -> None:
    topics = choose(8, 4200)
    assert len({topic.text for topic in topics}) == 8
    assert all(3000 < len(topic.text) <= 4200 for topic in topics)

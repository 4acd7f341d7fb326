"""Properties of the slot of a task."""

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.protocol.multimodal import IMAGE, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.task_messages import EngineBody, RequestTicket, TaskHeader
from shared.stage.slots import BEGINNING_TOKENS, slot_key, slot_of_task

SLOTS = 64
TEXTS = st.lists(st.integers(0, 2**31), max_size=300)
TICKET = RequestTicket(0.0, 1.0, 1, "receipt", tenant="t")
HEADER = TaskHeader("r", "m", "batch", TICKET)


def image(mm_hash: str, offset: int, length: int) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(IMAGE, mm_hash, PlaceholderRange(offset, length))


@st.composite
def bodies(draw: st.DrawFn) -> EngineBody:
    token_ids = draw(TEXTS)
    items = []
    has_image = draw(st.booleans())
    if token_ids and has_image:
        offset = draw(st.integers(0, len(token_ids) - 1))
        items = [image(draw(st.text()), offset, draw(st.integers(1, len(token_ids) - offset)))]
    return EngineBody(token_ids, items)


@given(bodies(), st.integers(2, 1000), st.integers(0, 3))
def test_a_repeated_hand_over_has_the_same_slot(body: EngineBody, num: int, round: int) -> None:
    later = replace(HEADER, round=round, ticket=replace(TICKET, receipt="another"))
    slot = slot_of_task(HEADER, body, num)
    assert slot == slot_of_task(later, body, num)
    assert slot is None or 0 <= slot < num
    assert slot_of_task(HEADER, body, 1) is None


def test_the_slot_does_not_depend_on_the_process() -> None:
    assert slot_of_task(HEADER, EngineBody([*range(200)], []), SLOTS) == 49


@given(bodies(), st.sampled_from(["tenant", "adapter", "cache_salt"]), st.text(min_size=1))
def test_tenants_adapters_and_salts_share_no_key(body: EngineBody, field: str, other: str) -> None:
    if field == "adapter":
        changed = replace(HEADER, adapter=other)
    else:
        changed = replace(HEADER, ticket=replace(TICKET, **{field: "t" + other}))
    key = slot_key(HEADER, body)
    assert key is None or slot_key(changed, body) != key


@given(TEXTS, TEXTS)
def test_questions_about_one_large_image_have_one_key(first: list[int], other: list[int]) -> None:
    item = image("dog", 0, 500)
    keys = {slot_key(HEADER, EngineBody([7] * 500 + text, [item])) for text in (first, other)}
    assert len(keys) == 1


def test_questions_about_one_small_image_have_one_key() -> None:
    item = image("dog", 3, 8)
    keys = {slot_key(HEADER, EngineBody([1] * num, [item])) for num in (20, 40)}
    assert len(keys) == 1
    assert None not in keys


def test_a_small_image_in_a_long_text_counts_as_text() -> None:
    text = list(range(400))
    keys = [
        slot_key(HEADER, EngineBody(text, [image(name, offset, 16)]))
        for name, offset in (("dog", 300), ("cat", 300), ("dog", 10), ("cat", 10))
    ]
    # Behind the beginning that decides it makes no difference, within it it does.
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@given(st.lists(st.integers(0, 2**31), min_size=BEGINNING_TOKENS, max_size=100), TEXTS)
def test_further_turns_of_a_chat_have_its_key(text: list[int], more: list[int]) -> None:
    assert slot_key(HEADER, EngineBody(text, [])) == slot_key(HEADER, EngineBody(text + more, []))


def test_chats_are_spread() -> None:
    rnd = random.Random(1)
    texts = [[rnd.randrange(1000) for _ in range(BEGINNING_TOKENS)] for _ in range(6400)]
    counts = Counter(slot_of_task(HEADER, EngineBody(text, []), SLOTS) for text in texts)
    assert len(counts) == SLOTS
    assert max(counts.values()) < 200


@given(bodies(), bodies(), st.text(min_size=1), st.text(min_size=1))
def test_requests_with_a_key_have_its_slot_for_any_prompt(
    first: EngineBody, second: EngineBody, key: str, other: str
) -> None:
    keyed = replace(HEADER, ticket=replace(TICKET, prompt_cache_key=key))
    assert slot_key(keyed, first) == slot_key(keyed, second) is not None
    assert slot_key(keyed, first) != slot_key(HEADER, first)
    another = replace(HEADER, ticket=replace(TICKET, prompt_cache_key=key + other))
    assert slot_key(another, first) != slot_key(keyed, first)


@given(st.sampled_from(["tenant", "adapter", "cache_salt"]), st.text(min_size=1))
def test_tenants_adapters_and_salts_share_no_slot_by_the_same_key(field: str, other: str) -> None:
    ticket = replace(TICKET, prompt_cache_key="chat")
    keyed = replace(HEADER, ticket=ticket)
    if field == "adapter":
        changed = replace(keyed, adapter=other)
    else:
        changed = replace(keyed, ticket=replace(ticket, **{field: "t" + other}))
    assert slot_key(keyed, EngineBody([], [])) != slot_key(changed, EngineBody([], []))


@pytest.mark.parametrize("num_tokens", [0, 1, BEGINNING_TOKENS - 1])
def test_short_prompts_have_no_slot(num_tokens: int) -> None:
    assert slot_of_task(HEADER, EngineBody([1] * num_tokens, []), SLOTS) is None

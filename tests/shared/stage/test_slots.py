"""Properties of the slot of a request."""

import random
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from shared.protocol.multimodal import IMAGE, MultiModalKwargsItem, PlaceholderRange
from shared.stage.slots import SlotRequest, beginning_blocks, slot_key, slot_of

BLOCK = 16
SLOTS = 64
TEXTS = st.lists(st.integers(0, 2**31), max_size=300)


def image(mm_hash: str, offset: int, length: int) -> MultiModalKwargsItem:
    return MultiModalKwargsItem(IMAGE, mm_hash, PlaceholderRange(offset, length))


@st.composite
def requests(draw: st.DrawFn) -> SlotRequest:
    token_ids = draw(TEXTS)
    items = []
    has_image = draw(st.booleans())
    if token_ids and has_image:
        offset = draw(st.integers(0, len(token_ids) - 1))
        items = [image(draw(st.text()), offset, draw(st.integers(1, len(token_ids) - offset)))]
    return SlotRequest(
        draw(st.text()),
        draw(st.text()),
        token_ids,
        items,
        draw(st.text()),
        draw(st.text()),
        draw(st.sampled_from(["", "a", "b"])),
    )


@given(requests(), st.integers(1, 1000))
def test_the_same_request_has_the_same_slot_and_it_exists(request: SlotRequest, num: int) -> None:
    again = replace(request, token_ids=tuple(request.token_ids))
    assert 0 <= slot_of(request, num, BLOCK) < num
    assert slot_of(again, num, BLOCK) == slot_of(request, num, BLOCK)


def test_the_slot_does_not_depend_on_the_process() -> None:
    request = SlotRequest("id", "tenant", list(range(200)))
    assert slot_of(request, SLOTS, BLOCK) == 29
    assert slot_of(SlotRequest("id", "tenant", []), SLOTS, BLOCK) == 26


@given(requests(), st.sampled_from(["tenant", "adapter", "cache_salt"]), st.text(min_size=1))
def test_tenants_adapters_and_salts_share_no_key(
    request: SlotRequest, field: str, other: str
) -> None:
    value = getattr(request, field)
    changed = replace(request, **{field: value + other})
    assert slot_key(changed, BLOCK) != slot_key(request, BLOCK)


@given(requests(), requests())
def test_requests_of_one_conversation_have_one_key(one: SlotRequest, two: SlotRequest) -> None:
    one = replace(one, conversation="chat")
    two = replace(
        two, conversation="chat", tenant=one.tenant, adapter=one.adapter, cache_salt=one.cache_salt
    )
    assert slot_key(one, BLOCK) == slot_key(two, BLOCK)


@given(TEXTS, TEXTS)
def test_questions_about_one_large_image_have_one_key(first: list[int], other: list[int]) -> None:
    keys = set()
    for number, text in enumerate((first, other)):
        item = image("dog", 0, 500)
        keys.add(slot_key(SlotRequest(str(number), "t", [7] * 500 + text, [item]), BLOCK))
    assert len(keys) == 1


def test_a_small_image_in_a_long_text_counts_as_text() -> None:
    text = list(range(400))
    keys = [
        slot_key(SlotRequest("r", "t", text, [image(name, offset, 16)]), BLOCK)
        for name, offset in (("dog", 300), ("cat", 300), ("dog", 10), ("cat", 10))
    ]
    # Behind the beginning that decides it makes no difference, within it it does.
    assert keys[0] == keys[1]
    assert len(set(keys)) == 3


@given(st.integers(0, 100_000))
def test_half_of_the_blocks_at_most_decide_and_a_power_of_two(num_blocks: int) -> None:
    found = beginning_blocks(num_blocks)
    if num_blocks < 4:
        assert found == 0
    else:
        assert found.bit_count() == 1
        assert 4 <= found <= max(4, num_blocks / 2)
        assert found > num_blocks / 4 or found == 4


@given(st.integers(8 * BLOCK, 900), st.integers(0, 300))
def test_a_turn_within_the_same_power_of_two_finds_the_slot(num_tokens: int, more: int) -> None:
    text = [id % 50 for id in range(num_tokens)]
    longer = text + [5] * more
    same = beginning_blocks(len(text) // BLOCK) == beginning_blocks(len(longer) // BLOCK)
    keys = [slot_key(SlotRequest("", "t", ids), BLOCK) for ids in (text, longer)]
    assert (keys[0] == keys[1]) == same


def test_further_turns_of_a_chat_mostly_find_the_slot() -> None:
    rnd = random.Random(1)
    same = turns = 0
    for chat in range(200):
        text = [rnd.randrange(1000) for _ in range(rnd.randint(300, 1500))]
        slots = []
        for turn in range(6):
            text += [rnd.randrange(1000) for _ in range(rnd.randint(50, 300))]
            slots.append(slot_of(SlotRequest(f"{chat}-{turn}", "t", list(text)), SLOTS, BLOCK))
        same += sum(a == b for a, b in pairwise(slots))
        turns += len(slots) - 1
    assert same / turns > 0.75


@pytest.mark.parametrize("num_tokens", [0, 1, 4 * BLOCK - 1])
def test_short_prompts_are_spread(num_tokens: int) -> None:
    found = Counter(
        slot_of(SlotRequest(str(i), "t", [1] * num_tokens), SLOTS, BLOCK) for i in range(6400)
    )
    assert len(found) == SLOTS
    assert max(found.values()) < 200

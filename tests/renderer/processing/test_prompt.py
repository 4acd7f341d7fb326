from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.protocol.multimodal import IMAGE, VIDEO, Modality, PlaceholderRange, Placement
from shared.protocol.requests import ImagePart, ImageURL, Message, TextPart
from workers.renderer.processing.prompt import expand, media_parts, template_messages

PAD = 9
IDS = {IMAGE: PAD}


@dataclass(frozen=True)
class Sized:
    num_tokens: int
    modality: Modality = IMAGE
    placement: Placement | None = None


def sized(counts: list[int]) -> list[Sized]:
    return [Sized(count) for count in counts]


prompts = st.lists(st.integers(0, 12), max_size=50)


@given(prompts, st.data())
def test_the_ith_placeholder_takes_the_ith_count(token_ids: list[int], data: st.DataObject) -> None:
    num = token_ids.count(PAD)
    counts = data.draw(st.lists(st.integers(1, 20), min_size=num, max_size=num))
    expanded, ranges = expand(token_ids, sized(counts), IDS)
    assert [r.length for r in ranges] == counts
    for r in ranges:
        assert expanded[r.offset : r.offset + r.length] == [PAD] * r.length
    # Folding every run back into one placeholder, from the last on, gives the prompt again.
    for r in reversed(ranges):
        expanded[r.offset : r.offset + r.length] = [PAD]
    assert expanded == token_ids


def test_a_small_example() -> None:
    assert expand([1, PAD, 2, PAD], sized([3, 2]), IDS) == (
        [1, PAD, PAD, PAD, 2, PAD, PAD],
        [PlaceholderRange(1, 3), PlaceholderRange(5, 2)],
    )


def test_adjacent_placeholders_stay_apart() -> None:
    assert expand([PAD, PAD], sized([2, 3]), IDS)[1] == [
        PlaceholderRange(0, 2),
        PlaceholderRange(2, 3),
    ]


@given(prompts.filter(lambda ids: PAD not in ids))
def test_without_placeholders_the_prompt_is_unchanged(token_ids: list[int]) -> None:
    assert expand(token_ids, [], IDS) == (token_ids, [])


@given(prompts, st.integers(-2, 2).filter(bool))
def test_another_number_of_images_is_refused(token_ids: list[int], difference: int) -> None:
    num = token_ids.count(PAD) + difference
    if num >= 0:
        with pytest.raises(InvalidRequest, match=f"{num} media"):
            expand(token_ids, sized([1] * num), IDS)


class Counted(list[int]):
    """Counts the items that are looked at."""

    looks = 0

    def __iter__(self) -> Iterator[int]:
        for item in super().__iter__():
            self.looks += 1
            yield item

    def __getitem__(self, index: Any) -> Any:
        item = super().__getitem__(index)
        self.looks += len(item) if isinstance(index, slice) else 1
        return item


def test_each_modality_has_its_own_placeholder() -> None:
    media = [Sized(2, VIDEO), Sized(3)]
    ids = {IMAGE: PAD, VIDEO: 8}
    assert expand([8, 1, PAD], media, ids) == (
        [8, 8, 1, PAD, PAD, PAD],
        [PlaceholderRange(0, 2), PlaceholderRange(3, 3)],
    )
    with pytest.raises(InvalidRequest, match="do not match the request"):
        expand([PAD, 1, 8], media, ids)


def test_a_placement_puts_text_between_its_placeholders() -> None:
    times = Placement([5, PAD, PAD, 6, PAD, 7, 7, 7, PAD], (PAD,))
    media = [Sized(4, placement=times), Sized(1)]
    expanded, ranges = expand([1, PAD, 2, PAD], media, IDS)
    assert expanded == [1, *times.token_ids, 2, PAD]
    assert ranges == [PlaceholderRange(1, 9, bytes([0b00010110, 1])), PlaceholderRange(11, 1)]
    assert ranges[0].embed_indexes() == [1, 2, 4, 8]
    assert ranges[0].num_embeds == 4


def test_a_placement_replaces_the_marks_around_its_placeholder_if_they_are_there() -> None:
    video = [Sized(2, placement=Placement([5, PAD, PAD], (PAD,), marks=(3, 4)))]
    for prompt, expected, offset in (
        ([1, 3, PAD, 4, 2], [1, 5, PAD, PAD, 2], 1),
        ([3, PAD, 4], [5, PAD, PAD], 0),
        ([1, 3, PAD, 2], [1, 3, 5, PAD, PAD, 2], 2),
        ([PAD, 4], [5, PAD, PAD, 4], 0),
        ([3, PAD], [3, 5, PAD, PAD], 1),
    ):
        expanded, ranges = expand(prompt, video, IDS)
        assert expanded == expected
        assert (ranges[0].offset, ranges[0].length) == (offset, 3)


def test_expansion_takes_linear_time() -> None:
    def num_looks(num: int) -> int:
        token_ids = Counted([PAD, 1] * num)
        expand(token_ids, sized([4] * num), IDS)
        return token_ids.looks

    assert num_looks(50_000) <= 3 * 100_000
    assert num_looks(100_000) == 2 * num_looks(50_000)


def image() -> ImagePart:
    return ImagePart(ImageURL("data:,"))


def test_images_are_found_in_the_order_of_the_template() -> None:
    messages = [
        Message("system", "text"),
        Message("user", [TextPart("a"), image(), image()]),
        Message("user", [image()]),
    ]
    assert [part.field for part in media_parts(messages)] == [
        "messages[1].content[1].image_url.url",
        "messages[1].content[2].image_url.url",
        "messages[2].content[0].image_url.url",
    ]


def test_messages_take_the_shape_of_the_template() -> None:
    messages = [Message("system", "s"), Message("user", [TextPart("a"), image(), TextPart("b")])]
    assert template_messages(messages, parts=True, text=str.upper) == [
        {"role": "system", "content": "S"},
        {
            "role": "user",
            "content": [
                {"type": "text", "text": "A"},
                {"type": "image"},
                {"type": "text", "text": "B"},
            ],
        },
    ]
    in_text = template_messages(messages, parts=False, placeholders={"image": "<img>"})
    assert in_text[1] == {"role": "user", "content": "a\n<img>\nb"}
    assert template_messages(messages[:1], parts=True, strings=False, text=str.upper) == [
        {"role": "system", "content": [{"type": "text", "text": "S"}]}
    ]

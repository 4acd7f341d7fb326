"""Names of models in subjects: one token each, and another for each name."""

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shared.protocol import subjects
from shared.protocol.names import decode_model, encode_model, is_model_name

NAMES = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
PLAIN = st.from_regex(r"[A-Za-z0-9_-]{1,128}", fullmatch=True)
CONFUSING = st.text(st.sampled_from("ab=2E./ é%"), min_size=1, max_size=8)


@given(NAMES | CONFUSING)
@example("org/Qwen2.5-VL")
@example("=2E")
@example("..")
def test_a_name_is_one_token_that_decodes_to_it(name: str) -> None:
    token = encode_model(name)
    # Neither a separator, a wildcard nor white space, in a subject, a consumer or a path.
    assert re.fullmatch(r"[A-Za-z0-9_=-]+", token)
    assert decode_model(token) == name


@given(NAMES | CONFUSING, NAMES | CONFUSING)
def test_two_names_have_two_tokens(name: str, other: str) -> None:
    assert (encode_model(name) == encode_model(other)) == (name == other)


@given(PLAIN)
def test_a_name_of_letters_digits_and_dashes_stays(name: str) -> None:
    assert encode_model(name) == name
    assert is_model_name(name)


@given(CONFUSING)
def test_a_token_that_is_no_encoding_stays(token: str) -> None:
    name = decode_model(token)
    assert name == token or encode_model(name) == token


SHORT = st.from_regex(r"[a_]{1,3}", fullmatch=True)
STAGES = st.tuples(SHORT, SHORT, st.sampled_from(subjects.LANES))


@given(STAGES, STAGES)
@example(("a", "b_c", "batch"), ("a_b", "c", "batch"))
def test_no_two_stages_have_the_same_consumer(
    stage: tuple[str, str, str], other: tuple[str, str, str]
) -> None:
    are_same = subjects.stage_consumer(*stage) == subjects.stage_consumer(*other)
    assert are_same == (stage == other)


SLOTS = st.none() | st.integers(0, 99)


@given(STAGES, SLOTS, STAGES, SLOTS)
def test_no_two_queues_have_the_same_consumer_or_filter(
    stage: tuple[str, str, str], slot: int | None, other: tuple[str, str, str], another: int | None
) -> None:
    are_same = (stage, slot) == (other, another)
    for name_of in (subjects.stage_consumer, subjects.stage_filter):
        assert (name_of(*stage, slot) == name_of(*other, another)) == are_same


@given(STAGES, SLOTS)
def test_a_queue_is_read_from_its_subject(stage: tuple[str, str, str], slot: int | None) -> None:
    for subject in (subjects.stage(*stage, "r", slot), subjects.stage_filter(*stage, slot)):
        assert subjects.parts_of_stage(subject) == stage
        assert subjects.slot_of_stage(subject) == slot


def test_no_lane_has_the_mark_of_a_slot() -> None:
    assert not any("-" in lane for lane in subjects.LANES)


def test_consumers_of_a_running_deployment_keep_their_names() -> None:
    consumers = [
        subjects.stage_consumer(name, "m_1", "batch") for name in ("renderer", "text-to-x")
    ]
    assert consumers == ["renderer_m_1_batch", "text-to-x_m_1_batch"]


@pytest.mark.parametrize(
    "name", ["qwen2.5-vl", "org/name", "a b", "模型", "a*", "a>", "=", "%2F", "x" * 128, "." * 66]
)
def test_names_as_people_have_them_are_allowed(name: str) -> None:
    assert is_model_name(name)
    parts = subjects.parts_of_stage(subjects.stage("engine", name, "batch", "r"))
    assert parts == ("engine", name, "batch")
    assert subjects.parts_of_stage(subjects.stage_filter("engine", name, "batch"))[1] == name
    assert subjects.model_of_stage(subjects.stage("engine", name, "batch", "r")) == name


@pytest.mark.parametrize(
    "name",
    ["", " a", "a ", "a\n", "a\x00b", "a\tb", "\u202eb", "\ud800", "x" * 129, "." * 67, "模" * 23],
)
def test_other_names_are_not(name: str) -> None:
    assert not is_model_name(name)

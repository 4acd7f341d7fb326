"""Merging the outputs of steps for the log, and reading a log for a resume."""

from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.records import ChoiceDelta, LogRecord, TokenChunk
from workers.engine.core.sequence import LoggedChoice, RequestOutput
from workers.engine.log_records import logged_choices, merge_deltas

# Steps of a request: for each step, the choices that got a token in it.
steps = st.lists(st.sets(st.integers(0, 2), min_size=1), min_size=1, max_size=20)


def outputs_of(steps: list[set[int]]) -> list[RequestOutput]:
    position = [0, 0, 0]
    outputs = []
    for step in steps:
        deltas = []
        for choice in sorted(step):
            at = position[choice]
            deltas.append(ChoiceDelta(choice, at, [100 * choice + at], f"<{choice}.{at}>"))
            position[choice] += 1
        outputs.append(RequestOutput("r", deltas))
    return outputs


@given(steps, st.data())
def test_merged_steps_hold_the_same_tokens_in_the_same_order(
    steps: list[set[int]], data: st.DataObject
) -> None:
    outputs = outputs_of(steps)
    cut = data.draw(st.integers(0, len(outputs)))
    merged = merge_deltas(outputs[:cut]) + merge_deltas(outputs[cut:])
    for choice in range(3):
        whole = [d for o in outputs for d in o.choices if d.index == choice]
        parts = [d for d in merged if d.index == choice]
        assert [t for d in parts for t in d.token_ids] == [t for d in whole for t in d.token_ids]
        assert "".join(d.text for d in parts) == "".join(d.text for d in whole)
        position = 0
        for part in parts:
            assert part.position == position
            position += len(part.token_ids)


@given(steps)
def test_a_log_gives_back_the_tokens_of_each_choice(steps: list[set[int]]) -> None:
    outputs = outputs_of(steps)
    records: list[LogRecord] = [TokenChunk(i, 1, o.choices) for i, o in enumerate(outputs)]
    expected = [
        LoggedChoice(
            [t for o in outputs for d in o.choices if d.index == c for t in d.token_ids], False
        )
        for c in range(3)
    ]
    assert logged_choices(records, 3) == expected


def test_an_empty_log_is_a_first_attempt() -> None:
    assert logged_choices([], 2) == []


def test_the_end_of_a_choice_survives_merging_and_reading() -> None:
    outputs = [
        RequestOutput("r", [ChoiceDelta(0, 0, [1], "a"), ChoiceDelta(1, 0, [5], "x")]),
        RequestOutput("r", [ChoiceDelta(0, 1, [2], "b", "stop", "b")]),
    ]
    merged = merge_deltas(outputs)
    assert merged[0] == ChoiceDelta(0, 0, [1, 2], "ab", "stop", "b")
    records: list[LogRecord] = [TokenChunk(0, 1, merged)]
    assert logged_choices(records, 2) == [LoggedChoice([1, 2], True), LoggedChoice([5], False)]

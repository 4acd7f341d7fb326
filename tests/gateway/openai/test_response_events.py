"""Events of responses: valid by the official client's types, and what its accumulator makes."""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from hypothesis import example, given
from hypothesis import strategies as st
from openai import omit
from openai.lib.streaming.responses._responses import ResponseStreamState
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from shared.protocol.records import ChoiceDelta, TokenChunk
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import Answered, Asked, Begun, Ended, Listed, ServerUse, Step
from shared.responses.state import state_of
from shared.responses.turns import turn_format
from tests.agent.logs import BEGUN, BOOK, ID, USAGE, logs
from workers.gateway.openai.response_events import ResponseEvents
from workers.gateway.openai.response_object import response_of
from workers.gateway.schemas.responses import ResponseEvent

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
CUT: list[Step] = [
    msgspec.structs.replace(BEGUN, servers=[ServerUse("calc")]),
    Listed(1, "calc", [BOOK]),
    Asked(2, 0),
    Answered(3, 0, "", [FunctionCall("calc__book", "{}")], USAGE, "length"),
    Ended(4, "incomplete", 2),
]
"""A call that needs approval, and is cut at the limit on tokens."""


def raw_text(step: Answered, form: str | None) -> str:
    """Return the text that the model has written for a step."""
    calls = [(call.name, json.loads(call.arguments)) for call in step.calls]
    if form == "required":
        return json.dumps([{"name": name, "parameters": arguments} for name, arguments in calls])
    texts = [
        "<tool_call>\n" + json.dumps({"name": name, "arguments": arguments}) + "\n</tool_call>"
        for name, arguments in calls
    ]
    texts.insert(step.num_before, step.content)
    return "".join(texts) if form else step.content


def chunks_of(raw: str, cuts: Sequence[int], reason: Any) -> list[TokenChunk]:
    """The records of a turn, cut anywhere."""
    ends = sorted({cut % (len(raw) + 1) for cut in cuts} | {len(raw)})
    texts = [raw[a:b] for a, b in zip([0, *ends], ends, strict=False)]
    last = len(texts) - 1
    return [
        TokenChunk(i, 1, [ChoiceDelta(0, i, [i], text, reason if i == last else None)])
        for i, text in enumerate(texts)
    ]


def as_written(steps: list[Step]) -> list[Step]:
    """The log with answers as an agent reads them from the model's text."""
    written: list[Step] = []
    for step in steps:
        if isinstance(step, Answered):
            state = state_of(ID, written)
            form = turn_format(state, state.turns[-1], state.tools())
            text = form.new_text()
            text.feed(raw_text(step, form.form), is_last=True)
            step = msgspec.structs.replace(
                step, content=text.content, calls=text.calls, num_before=text.num_before
            )
        written.append(step)
    return written


def events_of(steps: list[Step], cuts: Sequence[int]) -> Iterator[ResponseEvent]:
    events = ResponseEvents(ID, {})
    for i, step in enumerate(steps):
        yield from events.step(step)
        following = steps[i + 1] if i + 1 < len(steps) else None
        state = state_of(ID, steps[: i + 1])
        asks = isinstance(step, Asked) or (isinstance(step, Begun) and step.asks)
        if asks and isinstance(following, Answered):
            form = turn_format(state, state.turns[-1], state.tools())
            raw = raw_text(following, form.form)
            for record in chunks_of(raw, cuts, following.finish_reason):
                yield from events.token(record)


@given(logs(), st.lists(st.integers(0, 200), max_size=6))
@example(CUT, [])
def test_streamed_is_whole_is_what_clients_accumulate(steps: list[Step], cuts: list[int]) -> None:
    steps = as_written(steps)
    events = list(events_of(steps, cuts))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert list(events_of(steps, cuts)) == events
    whole = response_of(state_of(ID, steps), {})
    parsed = [EVENT.validate_json(msgspec.json.encode(event)) for event in events]
    assert events[-1].response == whole
    Response.model_validate_json(msgspec.json.encode(whole))
    client: ResponseStreamState[Any] = ResponseStreamState(input_tools=omit, text_format=omit)
    read = [client.handle_event(event) for event in parsed]
    check_deltas(events, msgspec.to_builtins(whole)["output"])
    ended = steps[-1]
    assert isinstance(ended, Ended)
    if ended.status == "completed":
        (completed,) = read[-1]
        assert completed.type == "response.completed"
        ours = msgspec.to_builtins(whole)
        theirs = json.loads(completed.response.model_dump_json(exclude_unset=True))
        assert len(theirs["output"]) == len(ours["output"])
        for mine, other in zip(ours["output"], theirs["output"], strict=True):
            assert {**other, **mine} == {**mine, **other} or mine["type"] == "message"


def check_deltas(events: list[ResponseEvent], output: list[dict[str, Any]]) -> None:
    """Deltas add up to the text of each item, and each item is added and done once."""
    texts: dict[int, str] = {}
    added: list[int] = []
    done: dict[int, Any] = {}
    for event in events:
        if event.delta is not None:
            assert event.output_index in added
            assert event.output_index not in done
            index = event.output_index or 0
            texts[index] = texts.get(index, "") + event.delta
        if event.type == "response.output_item.added":
            assert event.output_index not in added
            added.append(event.output_index or 0)
        if event.type == "response.output_item.done":
            assert event.output_index not in done
            done[event.output_index or 0] = msgspec.to_builtins(event.item)
    for index, item in enumerate(output):
        assert index in added
        if item.get("status") in ("completed", None) or item["type"] == "mcp_approval_request":
            assert done[index] == item
        if index in done:
            text = done[index].get("arguments", "")
            if item["type"] == "message":
                text = done[index]["content"][0]["text"]
            if item["type"] != "mcp_approval_request":
                assert texts.get(index, "") == text

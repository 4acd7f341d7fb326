"""Assemblers: a streamed answer equals the whole one in every process. And event streams."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai._streaming import SSEDecoder
from starlette.types import Message

from shared.errors import LogTruncated
from shared.protocol.records import ChoiceDelta, ErrorInfo, Finish, TokenChunk, TokenLogprobs, Usage
from tests.support.waiting import until
from workers.gateway.app import error_response
from workers.gateway.backend.active_request import MAX_OPEN_LOGS, merge_logs
from workers.gateway.core.assembler import Answering
from workers.gateway.http import sse
from workers.gateway.http.errors import RequestFailed
from workers.gateway.http.sse import EventStream, event
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.openai.chat_assembler import ChatAssembler
from workers.gateway.openai.completions import CompletionAssembler, CompletionOptions, Echo

TOKEN_BYTES = {token: bytes([97 + token]) for token in range(26)}
FINISH = Finish(9, 1, Usage(3, 9, 1), 1, [])


@st.composite
def logs(draw: st.DrawFn) -> list[TokenChunk]:
    """Token logs of two choices. Every record has a delta of one or both."""
    records = []
    position = [0, 0]
    finished: set[int] = set()
    for index in range(draw(st.integers(1, 8))):
        deltas = []
        for choice in draw(st.sets(st.integers(0, 1), min_size=1)) - finished:
            tokens = draw(st.lists(st.integers(0, 25), max_size=3))
            text = draw(st.text("abc<", max_size=4))
            done = draw(st.booleans()) and index > 3
            logprobs = [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in tokens]
            reason: Literal["stop"] | None = "stop" if done else None
            deltas.append(
                ChoiceDelta(choice, position[choice], tokens, text, reason, logprobs=logprobs)
            )
            position[choice] += len(tokens)
            finished |= {choice} if done else set()
        if deltas:
            records.append(TokenChunk(index, 1, deltas))
    return records


def tree(value: Any) -> Any:
    return msgspec.json.decode(msgspec.json.encode(value))


@given(logs())
def test_a_streamed_chat_equals_the_whole_one(records: list[TokenChunk]) -> None:
    def assembler() -> ChatAssembler:
        options = ChatOptions(include_usage=True, logprobs=True)
        return ChatAssembler(Answering("chatcmpl-1", "demo", 5, options, TOKEN_BYTES))

    first, second = assembler(), assembler()
    events = [first.add(0, record) for record in records] + [first.add(0, FINISH)]
    assert events == [second.add(0, record) for record in records] + [second.add(0, FINISH)]
    streamed = [choice for chunks in events for chunk in chunks for choice in chunk.choices]
    for whole in first.answer().choices:
        own = [tree(choice) for choice in streamed if choice.index == whole.index]
        assert [c["delta"].get("role") for c in own] == ["assistant"] + [None] * (len(own) - 1)
        text = "".join(choice["delta"].get("content", "") for choice in own)
        assert text == whole.message.content
        logprobs = [t for c in own if c["logprobs"] for t in c["logprobs"]["content"]]
        assert logprobs == tree(whole.logprobs)["content"]
        assert own[-1]["finish_reason"] == whole.finish_reason


@given(logs(), logs())
def test_streamed_completions_equal_the_whole_ones(
    first: list[TokenChunk], second: list[TokenChunk]
) -> None:
    echo = [Echo("xy"), Echo("z")]
    options = CompletionOptions(parts=2, n=2, logprobs=True, echo=echo)
    assembler = CompletionAssembler(Answering("cmpl-1", "demo", 5, options, TOKEN_BYTES))
    streamed = []
    for part, records in enumerate((first, second)):
        for record in records:
            streamed += [c for chunk in assembler.add(part, record) for c in chunk.choices]
        assert assembler.add(part, FINISH) == []
    answer = assembler.answer()
    assert tree(answer.usage)["total_tokens"] == 24
    for whole in answer.choices:
        own = [choice for choice in streamed if choice.index == whole.index]
        assert "".join(choice.text for choice in own) == whole.text
        assert whole.text.startswith(echo[whole.index // 2].text)
        assert whole.logprobs is not None
        tokens = [token for c in own if c.logprobs for token in c.logprobs.tokens]
        assert tokens == whole.logprobs.tokens


def test_text_offsets_count_characters_of_several_tokens() -> None:
    pieces = [b"a", b"\xf0\x9f", b"\x91\x8d", b"\xc3", b"\xa9", b"z"]
    token_bytes = dict(enumerate(pieces))
    text = b"".join(pieces).decode()
    options = CompletionOptions(logprobs=True, echo=[Echo(text, list(token_bytes))])
    assembler = CompletionAssembler(Answering("cmpl-1", "demo", 5, options, token_bytes))
    scored = [TokenLogprobs(-0.5, 1, [token], [-0.5]) for token in token_bytes]
    delta = ChoiceDelta(0, 0, list(token_bytes), text, "stop", logprobs=scored)
    (chunk,) = assembler.add(0, TokenChunk(0, 1, [delta], scored[1:]))
    assert chunk.choices[0].logprobs is not None
    offsets = chunk.choices[0].logprobs.text_offset
    assert offsets == [0, 1, 1, 2, 2, 3, 4, 5, 5, 6, 6, 7]


def test_a_stream_does_not_collect_log_probabilities() -> None:
    token_bytes = {0: b"a"}
    assemblers: list[ChatAssembler | CompletionAssembler] = [
        ChatAssembler(Answering("c", "demo", 5, ChatOptions(logprobs=True), token_bytes)),
        CompletionAssembler(
            Answering("c", "demo", 5, CompletionOptions(logprobs=True), token_bytes)
        ),
    ]
    delta = ChoiceDelta(0, 0, [0], "a", None, logprobs=[TokenLogprobs(-0.5, 1, [0], [-0.5])])
    for assembler in assemblers:
        assembler.collects_answer = False
        for index in range(3):
            (chunk,) = assembler.add(0, TokenChunk(index, 1, [delta]))
            assert chunk.choices[0].logprobs is not None
        assembler.add(0, FINISH)
        whole = tree(assembler.answer())["choices"][0]["logprobs"]
        assert not whole.get("content", whole.get("tokens"))


async def test_several_logs_are_merged() -> None:
    async def log(*records: str) -> AsyncGenerator[str, None]:
        for record in records:
            await asyncio.sleep(0)
            yield record

    merged = [item async for item in merge_logs([log("a", "b"), log(), log("c")])]
    assert sorted(merged) == [(0, "a"), (0, "b"), (2, "c")]
    assert [text for part, text in merged if part == 0] == ["a", "b"]


async def test_a_log_is_opened_when_another_has_ended() -> None:
    open_logs: set[int] = set()

    async def log(number: int) -> AsyncGenerator[int, None]:
        open_logs.add(number)
        assert len(open_logs) <= MAX_OPEN_LOGS
        await asyncio.sleep(0)
        yield number
        open_logs.remove(number)

    num_logs = 3 * MAX_OPEN_LOGS
    merged = [item async for item in merge_logs([log(number) for number in range(num_logs)])]
    assert sorted(merged) == [(number, number) for number in range(num_logs)]


async def test_a_failing_log_raises_its_error_and_stops_the_others() -> None:
    closed = 0

    async def endless() -> AsyncGenerator[str, None]:
        nonlocal closed
        try:
            while True:
                await asyncio.sleep(0)
                yield "x"
        finally:
            closed += 1

    async def broken() -> AsyncGenerator[str, None]:
        yield "a"
        raise LogTruncated("gone")

    with pytest.raises(LogTruncated):
        async for _ in merge_logs([endless(), broken()]):
            pass
    assert closed == 1
    # The test refers to the logs, so that only the merger can close them.
    logs = [endless(), endless(), endless()]
    left = merge_logs(logs)
    async for _ in left:
        break
    await left.aclose()
    assert closed == 4
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def run(
    events: AsyncIterator[bytes],
    disconnect: asyncio.Event | None = None,
    shutting_down: asyncio.Event | None = None,
    *,
    numbered: bool = False,
    messages: list[Message] | None = None,
) -> list[Message]:
    messages = [] if messages is None else messages
    disconnected: list[bool] = []

    async def receive() -> Message:
        await (disconnect or asyncio.Event()).wait()
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        messages.append(message)

    headers = {"x-request-id": "r"}
    stream = EventStream(
        events,
        lambda: disconnected.append(True),
        shutting_down or asyncio.Event(),
        error_response,
        headers,
        numbered=numbered,
    )
    await stream({"type": "http"}, receive, send)
    return messages


async def test_a_silent_stream_is_kept_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)
    messages: list[Message] = []

    def has_pings(count: int) -> bool:
        return [message.get("body") for message in messages].count(sse.PING) >= count

    async def until_pinged(count: int) -> None:
        await until(lambda: has_pings(count))

    async def events() -> AsyncIterator[bytes]:
        await until_pinged(1)
        yield event(b"1", "0")
        await until_pinged(3)
        yield event(b"2", "1")

    start, *bodies = await run(events(), messages=messages)
    assert start["status"] == 200
    written = b"".join(body["body"] for body in bodies)
    assert written.startswith(sse.PING)
    assert written.replace(sse.PING, b"") == b"id: 0\ndata: 1\n\nid: 1\ndata: 2\n\ndata: [DONE]\n\n"
    assert bodies[-1] == {"type": "http.response.body", "body": sse.DONE, "more_body": False}
    assert written.count(sse.PING) >= 3


async def test_the_official_client_ignores_pings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "PING_S", 0.02)

    async def events(ids: list[str]) -> AsyncIterator[bytes]:
        for event_id in ids:
            yield event(b"1", event_id)
            await asyncio.sleep(0.1)

    for ids in (["0", "1"], ["", ""]):
        _, *bodies = await run(events(ids), numbered=ids[0] != "")
        written = [body["body"] for body in bodies]
        assert any(body.startswith(b": ping") for body in written[1:])
        assert [message.data for message in SSEDecoder().iter_bytes(iter(written))] == [
            "1",
            "1",
            "[DONE]",
        ]


async def test_an_error_is_a_status_before_the_first_event_and_else_an_event() -> None:
    failure = RequestFailed(
        ErrorInfo("context_length_exceeded", "too long", None, "client", False), "7"
    )

    async def events(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield event(b"1", "0")
        raise failure

    start, *_ = await run(events(0))
    assert start["status"] == 400
    start, *bodies = await run(events(1))
    assert start["status"] == 200
    written = b"".join(body["body"] for body in bodies)
    assert b'id: 7\ndata: {"error":{"message":"too long"' in written
    assert written.endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize("numbered", [False, True])
async def test_only_an_unnumbered_stream_reports_the_shutdown(*, numbered: bool) -> None:
    shutting_down, began = asyncio.Event(), asyncio.Event()

    async def events(count: int) -> AsyncIterator[bytes]:
        for _ in range(count):
            yield event(b"1", "0" if numbered else "")
            shutting_down.set()
        await began.wait()

    asyncio.get_running_loop().call_later(0.05, shutting_down.set)
    start, *_ = await run(events(0), shutting_down=shutting_down, numbered=numbered)
    assert start["status"] == 503
    assert (b"x-request-id", b"r") in start["headers"]
    shutting_down.clear()
    start, *bodies = await run(events(1), shutting_down=shutting_down, numbered=numbered)
    assert start["status"] == 200
    written = b"".join(body["body"] for body in bodies)
    assert (b'"code":"interrupted"' in written) == (not numbered)
    assert written.endswith(b"data: [DONE]\n\n") == (not numbered)
    assert bodies[-1]["more_body"] == numbered

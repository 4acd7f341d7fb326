"""`/v1/responses` with the demo model, through the official client."""

import base64
import secrets
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.steps import Answered, Begun, Ended, decode_step
from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_auth import ALICE, BOB, KEYS
from tests.gateway.http.test_middleware import check_error
from tests.gateway.routes.test_chat import star_url

PATH = "/v1/responses"
IMAGE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "input_image", "image_url": star_url(), "detail": "auto"},
            {"type": "input_text", "text": "What colour is it?"},
        ],
    }
]
ADD: Any = {
    "type": "function",
    "name": "add",
    "strict": True,
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "integer", "maximum": 9}},
        "required": ["a"],
        "additionalProperties": False,
        "x-guidance": {"whitespace_flexible": False},
    },
}
FILE_PART: dict[str, Any] = {"type": "input_file", "file_id": ""}
NAME: Any = ADD | {"name": "name"}


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_an_image_is_described_and_the_conversation_continues(client: AsyncOpenAI) -> None:
    first = await client.responses.create(
        model="demo", input=IMAGE, temperature=0, metadata={"a": "b"}, instructions="Be brief."
    )
    assert "yellow" in first.output_text
    assert (first.status, first.metadata, first.instructions) == (
        "completed",
        {"a": "b"},
        "Be brief.",
    )
    assert first.usage is not None
    assert first.usage.input_tokens > 10
    events = await client.responses.create(
        model="demo",
        input="And now?",
        previous_response_id=first.id,
        stream=True,
        include=["message.output_text.logprobs"],
        top_logprobs=2,
        max_output_tokens=8,
    )
    stream = [event async for event in events]
    final: Any = stream[-1]
    assert [event.sequence_number for event in stream] == list(range(len(stream)))
    assert final.response.instructions is None
    (part,) = final.response.output[0].content
    deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == part.text
    assert len(part.logprobs) == final.response.usage.output_tokens
    assert len(part.logprobs[0].top_logprobs) == 2
    # The picture of the first response is part of the prompt, and its prefix is cached.
    assert final.response.usage.input_tokens > first.usage.input_tokens
    stored = await client.responses.retrieve(final.response.id)
    assert stored == final.response
    again = await client.responses.retrieve(final.response.id, stream=True, starting_after=3)
    assert [event async for event in again] == stream[4:]
    counted = await client.responses.input_tokens.count(
        model="demo", input="And now?", previous_response_id=first.id
    )
    assert counted.input_tokens == final.response.usage.input_tokens

    items = await client.responses.input_items.list(first.id)
    (message,) = items.data
    assert message.content[0].image_url is None
    items = await client.responses.input_items.list(
        first.id, include=["message.input_image.image_url"], order="asc", limit=1
    )
    assert items.data[0].content[0].image_url == star_url()

    references: Any = [{"type": "item_reference", "id": message.id}]
    references += [{"type": "item_reference", "id": item.id} for item in first.output]
    continued = await client.responses.create(
        model="demo",
        input=[*references, {"role": "user", "content": "And now?"}],
        max_output_tokens=1,
    )
    assert continued.usage is not None
    assert continued.usage.input_tokens == final.response.usage.input_tokens
    inputs = await client.responses.input_items.list(continued.id, order="asc")
    assert [item.id for item in inputs.data[:2]] == [message.id, first.output[0].id]

    await client.responses.delete(first.id)
    for gone in (client.responses.retrieve(first.id), client.responses.delete(first.id)):
        with pytest.raises(openai.NotFoundError):
            await gone
    with pytest.raises(openai.NotFoundError) as refused:
        await client.responses.create(
            model="demo", input="And now?", previous_response_id=final.response.id
        )
    assert refused.value.code == "previous_response_not_found"


async def test_a_stored_file_is_an_item(client: AsyncOpenAI) -> None:
    question = {"type": "input_text", "text": "What colour is it?"}
    image = base64.b64decode(star_url().partition(",")[2])
    stored = await client.files.create(file=("star.png", image), purpose="vision")
    for part in ({"type": "input_image", "file_id": stored.id, "detail": "auto"}, FILE_PART):
        content: Any = [part | {"file_id": stored.id}, question]
        response = await client.responses.create(
            model="demo", input=[{"role": "user", "content": content}], temperature=0
        )
        assert "yellow" in response.output_text
        counted = await client.responses.input_tokens.count(
            model="demo", input=[{"role": "user", "content": content}]
        )
        assert response.usage is not None
        assert counted.input_tokens == response.usage.input_tokens
    listed: Any = await client.responses.input_items.list(response.id)
    assert listed.data[0].content[0].filename == "star.png"
    # A file of another kind, and one that is not there.
    text = await client.files.create(file=("notes.txt", b"What is red?"), purpose="user_data")
    for name, code in ((text.id, "unsupported_content"), (f"file-{'0' * 64}", "media_not_found")):
        content = [FILE_PART | {"file_id": name}, question]
        with pytest.raises(openai.APIStatusError) as refused:
            await client.responses.create(
                model="demo", input=[{"role": "user", "content": content}]
            )
        assert (refused.value.code, refused.value.param) == (code, "input[0].content[0].file_id")


async def test_the_first_turn_of_a_response_has_no_separate_step(
    client: AsyncOpenAI, bus: Bus
) -> None:
    name = secrets.token_hex(8)
    responses = [
        await client.responses.create(model="demo", input="Hi", extra_headers=headers)
        for headers in ({}, {"X-Request-Id": name}, {"X-Request-Id": name})
    ]
    assert responses[1].id == responses[2].id != responses[0].id
    for response in responses:
        stored = await bus.read(subjects.STEPS_STREAM, subjects.steps("", response.id))
        steps = [decode_step(message.data) for message in stored]
        assert [type(step) for step in steps] == [Begun, Answered, Ended]


async def test_functions_are_called_and_their_results_are_used(client: AsyncOpenAI) -> None:
    body: Any = {"model": "demo", "input": "Add 3.", "tools": [ADD, NAME], "max_output_tokens": 90}
    called = await client.responses.create(**body, tool_choice={"type": "function", "name": "add"})
    (call,) = called.output
    assert call.type == "function_call"
    assert (call.name, called.status) == ("add", "completed")
    answered = await client.responses.create(
        model="demo",
        previous_response_id=called.id,
        input=[{"type": "function_call_output", "call_id": call.call_id, "output": "5"}],
        max_output_tokens=8,
    )
    assert answered.output_text
    # All items at once, without a stored response.
    items: Any = [
        {"role": "user", "content": "Add 3."},
        call.model_dump(),
        {"type": "function_call_output", "call_id": call.call_id, "output": "5"},
    ]
    alone = await client.responses.create(
        model="demo", input=items, max_output_tokens=8, store=False, temperature=0
    )
    assert alone.output_text
    # It is not stored, but its broken stream can be continued.
    with pytest.raises(openai.NotFoundError):
        await client.responses.retrieve(alone.id)
    with pytest.raises(openai.NotFoundError):
        await client.responses.input_items.list(alone.id)
    stream = [event async for event in await client.responses.retrieve(alone.id, stream=True)]
    assert getattr(stream[-1], "response", None) == alone
    choice: Any = {
        "type": "allowed_tools",
        "mode": "required",
        "tools": [{"type": "function", "name": "name"}],
    }
    for _ in range(4):
        limited = await client.responses.create(
            **body, tool_choice=choice, temperature=2, parallel_tool_calls=False
        )
        (function_call,) = limited.output
        assert function_call.type == "function_call"
        assert function_call.name == "name"
    single: Any = {"tool_choice": "required", "parallel_tool_calls": False}
    async with client.responses.stream(**body, **single) as events:
        async for _ in events:
            pass
        final = await events.get_final_response()
    assert {item.type for item in final.output} == {"function_call"}

    missing: Any = [items[0], items[1]]
    with pytest.raises(openai.BadRequestError, match="there is no output of the call"):
        await client.responses.create(model="demo", input=missing)
    assert (await client.responses.create(**body)).output


async def test_background_responses_are_followed_and_cancelled(client: AsyncOpenAI) -> None:
    long: Any = {"model": "demo", "input": "What do you see?", "background": True}
    started = await client.responses.create(**long)
    assert started.status == "queued"
    events = await client.responses.retrieve(started.id, stream=True)
    kinds = [event.type async for event in events]
    assert kinds[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    done = await client.responses.retrieve(started.id)
    assert (done.status, done.background) == ("completed", True)
    ended = await client.responses.cancel(started.id)
    assert ended.status == "completed"
    running = await client.responses.create(**long)
    cancelled = await client.responses.cancel(running.id)
    assert cancelled.status in ("cancelled", "completed")
    assert (await client.responses.cancel(running.id)).status == cancelled.status
    structured = await client.responses.create(
        model="demo",
        input="What do you see?",
        text={
            "format": {
                "type": "json_schema",
                "name": "n",
                "schema": {"enum": ["red", "blue"], "x-guidance": {"whitespace_flexible": False}},
            }
        },
    )
    assert structured.output_text in ('"red"', '"blue"')
    cut = await client.responses.create(model="demo", input="Hello", max_output_tokens=1)
    assert cut.status == "incomplete"
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"
    assert cut.output[0].status == "incomplete"


async def test_truncation_drops_the_oldest_items(client: AsyncOpenAI) -> None:
    items: Any = [{"role": "user", "content": "a b " * 100}, {"role": "assistant", "content": "c"}]
    long: Any = {"model": "demo", "input": [*items * 8, {"role": "user", "content": "What is it?"}]}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.responses.create(**long)
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "input")
    response = await client.responses.create(**long, truncation="auto", max_output_tokens=5)
    assert response.usage is not None
    assert 400 < response.usage.input_tokens < 1024
    with pytest.raises(openai.BadRequestError):
        await client.responses.create(
            model="demo", input="a b " * 900, truncation="auto", max_output_tokens=5
        )


LARGE = "data:image/png;base64," + "?" * 2**19


@pytest.mark.parametrize(
    ("changes", "code", "field"),
    [
        ({"conversation": "c"}, "unsupported_parameter", "conversation"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"reasoning": {"effort": "high"}}, "unsupported_parameter", "reasoning"),
        ({"modalities": ["text", "audio"]}, "unsupported_parameter", "modalities"),
        ({"audio": {"voice": "a", "format": "wav"}}, "unsupported_parameter", "audio"),
        ({"include": ["file_search_call.results"]}, "unsupported_parameter", "include"),
        ({"include": ["reasoning.encrypted_content"]}, "unsupported_parameter", "include"),
        ({"tools": [{"type": "web_search"}]}, "unsupported_parameter", "tools[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "not_found", "input[0].id"),
        ({"input": [{"role": "user"}]}, "invalid_request", "input[0].content"),
        ({"input": [{"role": "user", "content": "x", "y": 1}]}, "unknown_parameter", "input[0].y"),
        ({"input": []}, "invalid_request", "input"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": LARGE}]}]},
            "invalid_media",
            "input[0].content[0].image_url",
        ),
        ({"background": True, "store": False}, "invalid_request", "background"),
        ({"top_logprobs": 2}, "invalid_request", "top_logprobs"),
        ({"tools": [ADD, ADD]}, "invalid_request", "tools[1].name"),
        ({"tool_choice": "required"}, "invalid_request", "tool_choice"),
        (
            {"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}},
            "invalid_request",
            "tool_choice.name",
        ),
        ({"metadata": {"x" * 65: "y"}}, "invalid_request", "metadata"),
        ({"nonsense": 1}, "unknown_parameter", "nonsense"),
        ({"model": "other"}, "unknown_model", "model"),
    ],
)
async def test_what_is_refused(
    http: httpx.AsyncClient, changes: dict[str, Any], code: str, field: str
) -> None:
    got = await http.post(PATH, json={"model": "demo", "input": "Hello"} | changes)
    assert got.status_code in (400, 404, 422), got.text
    check_error(got.content, code, field)


async def test_tenants_do_not_find_each_other_and_quotas_hold(another: Start, bus: Bus) -> None:
    gateway = another(api_keys=KEYS)
    async with httpx.AsyncClient(base_url=gateway.url, timeout=60, trust_env=False) as http:
        body = {"model": "demo", "input": "Hello", "max_output_tokens": 2}
        named = {"authorization": f"Bearer {ALICE}", "idempotency-key": "one"}
        mine = (await http.post(PATH, json=body, headers=named)).json()
        assert mine["status"] == "incomplete"
        # The same name is the same response, and another content under it is refused.
        assert (await http.post(PATH, json=body, headers=named)).json() == mine
        other = await http.post(PATH, json=body | {"input": "Hi"}, headers=named)
        check_error(other.content, "request_id_reused", "X-Request-Id")
        url, bob = f"{PATH}/{mine['id']}", {"authorization": f"Bearer {BOB}"}
        assert (await http.get(url, headers=named)).json() == mine
        for foreign in (http.get(url, headers=bob), http.delete(url, headers=bob)):
            check_error((await foreign).content, "not_found", "id")
        reply = await http.post(PATH, json=body | {"previous_response_id": mine["id"]}, headers=bob)
        check_error(reply.content, "previous_response_not_found", "previous_response_id")
        # A deleted response leaves no message in any stream.
        assert (await http.delete(url, headers=named)).json()["deleted"] is True
        for stream in (subjects.STEPS_STREAM, subjects.TOKENS_STREAM):
            left = await bus.figures.subjects_of(stream, "pm.>")
            assert not [subject for subject in left if mine["id"] in subject]

"""The official `openai` package against a gateway: an independent check of its answers."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Literal

import openai
import pytest
from openai import AsyncOpenAI
from pydantic import BaseModel, ConfigDict

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from tests.gateway.conftest import Gateway, Start, start_gateway_at
from tests.gateway.http.test_auth import ALICE, KEYS
from tests.gateway.routes.test_chat import ROOT, star_url

MODEL = ROOT / "ops" / "demo_model"
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "paint",
            "description": "Paint a picture",
            "parameters": {
                "type": "object",
                "properties": {"colour": {"enum": ["red", "blue"]}},
                "required": ["colour"],
                "additionalProperties": False,
            },
        },
    },
    {
        "type": "function",
        "function": {
            "name": "measure",
            "parameters": {
                "type": "object",
                "properties": {"round": {"type": "boolean"}},
                "required": ["round"],
                "additionalProperties": False,
            },
        },
    },
]
IMAGE: Any = [
    {
        "role": "user",
        "content": [
            {"type": "image_url", "image_url": {"url": star_url()}},
            {"type": "text", "text": "What colour is it?"},
        ],
    }
]
HELLO: Any = [{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hello"}]


# The demo model likes spaces.
COMPACT: dict[str, Any] = {"x-guidance": {"whitespace_flexible": False}}


class Shape(BaseModel):
    model_config = ConfigDict(json_schema_extra=dict(COMPACT))

    round: bool
    colour: Literal["red", "yellow"]


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0) as client:
        yield client


async def test_an_image_is_described(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(model="demo", messages=IMAGE)
    assert "yellow" in (answer.choices[0].message.content or "")
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens > 0


async def test_a_stream(client: AsyncOpenAI) -> None:
    stream = await client.chat.completions.create(
        model="demo", messages=IMAGE, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert "yellow" in text
    assert chunks[-1].usage is not None
    async with client.chat.completions.stream(model="demo", messages=IMAGE) as events:
        final = await events.get_final_completion()
    assert final.choices[0].message.content == text


async def test_completions(client: AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="demo", prompt="What", max_tokens=4, logprobs=2, seed=-1
    )
    (choice,) = answer.choices
    assert choice.logprobs is not None
    assert choice.logprobs.tokens is not None
    assert len(choice.logprobs.tokens) == 4
    stream = await client.completions.create(
        model="demo", prompt=[[5, 6, 7], [7, 8]], max_tokens=4, stream=True
    )
    assert {c.index async for chunk in stream for c in chunk.choices} == {0, 1}


async def test_a_completion_has_16_tokens_by_default(client: AsyncOpenAI) -> None:
    on: Any = {"ignore_eos": True}
    answer = await client.completions.create(model="demo", prompt="What", extra_body=on)
    null = await client.completions.create(
        model="demo", prompt="What", max_tokens=None, extra_body=on
    )
    more = await client.completions.create(
        model="demo", prompt="What", max_tokens=20, extra_body=on
    )
    used = [answer.usage, null.usage, more.usage]
    assert [usage.completion_tokens for usage in used if usage is not None] == [16, 16, 20]
    assert answer.choices[0].finish_reason == "length"


async def test_log_probabilities(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(
        model="demo", messages=HELLO, logprobs=True, top_logprobs=3, max_completion_tokens=5
    )
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert [len(token.top_logprobs) for token in logprobs.content] == [3] * len(logprobs.content)


async def test_models(client: AsyncOpenAI) -> None:
    assert [model.id async for model in await client.models.list()] == ["demo"]
    assert (await client.models.retrieve("demo")).owned_by == "pagemill"


async def test_an_answer_follows_its_schema(client: AsyncOpenAI) -> None:
    answer = await client.chat.completions.parse(
        model="demo", messages=IMAGE, response_format=Shape, max_tokens=200
    )
    assert answer.choices[0].message.parsed is not None
    held: Any = {"type": "object", "properties": {"n": {"const": 3}}, "required": ["n"]} | COMPACT
    held["additionalProperties"] = False
    constrained = await client.chat.completions.create(
        model="demo",
        messages=HELLO,
        response_format={"type": "json_schema", "json_schema": {"name": "n", "schema": held}},
        max_tokens=200,
    )
    assert json.loads(constrained.choices[0].message.content or "")["n"] == 3


async def test_an_invalid_schema_is_refused(client: AsyncOpenAI) -> None:
    schema: Any = {"type": "nonsense"}
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        await client.chat.completions.create(model="demo", messages=HELLO, response_format=form)
    assert refused.value.code == "invalid_grammar"


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "paint"}}]
)
async def test_required_tools_are_called(client: AsyncOpenAI, choice: Any) -> None:
    body: Any = {
        "model": "demo",
        "messages": IMAGE,
        "tools": TOOLS,
        "tool_choice": choice,
        "parallel_tool_calls": False,
        "max_tokens": 200,
        "temperature": 0.0,
    }
    answer = await client.chat.completions.create(**body)
    assert answer.choices[0].finish_reason == "tool_calls"
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    assert call.function.name in ("paint", "measure")
    arguments = json.loads(call.function.arguments)
    assert arguments in ({"colour": "red"}, {"colour": "blue"}, {"round": True}, {"round": False})
    async with client.chat.completions.stream(**body) as events:
        streamed = await events.get_final_completion()
    (again,) = streamed.choices[0].message.tool_calls or []
    assert (again.function.name, json.loads(again.function.arguments)) == (
        call.function.name,
        arguments,
    )
    # The result is sent back.
    turn: Any = [
        *IMAGE,
        answer.choices[0].message.model_dump(),
        {"role": "tool", "tool_call_id": call.id, "content": "done"},
    ]
    ended = await client.chat.completions.create(model="demo", messages=turn, max_tokens=8)
    assert ended.usage is not None
    assert answer.usage is not None
    assert ended.usage.prompt_tokens > answer.usage.prompt_tokens


async def test_errors_have_the_clients_own_types(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as unknown:
        await client.chat.completions.create(model="other", messages=HELLO)
    assert unknown.value.code == "unknown_model"
    with pytest.raises(openai.BadRequestError) as wrong:
        await client.chat.completions.create(model="demo", messages=HELLO, temperature=9)
    assert wrong.value.param == "temperature"
    broken: Any = [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]
    messages: Any = [{"role": "user", "content": broken}]
    with pytest.raises(openai.UnprocessableEntityError):
        await client.chat.completions.create(model="demo", messages=messages)
    with pytest.raises(openai.NotFoundError):
        await client.moderations.create(input="x")


async def test_keys_and_retries(another: Start) -> None:
    gateway = another(api_keys=[KEYS[0] | {"max_requests_per_minute": 60, "max_concurrent": 1}])
    base = f"{gateway.url}/v1"
    async with AsyncOpenAI(base_url=base, api_key="pm-wrong", max_retries=0) as stranger:
        with pytest.raises(openai.AuthenticationError):
            await stranger.models.list()
    async with AsyncOpenAI(base_url=base, api_key=ALICE, max_retries=4) as alice:
        busy = await alice.chat.completions.create(
            model="demo",
            messages=HELLO,
            stream=True,
            max_tokens=60,
            extra_body={"ignore_eos": True},
        )
        # The client is asked to retry in a second, and does.
        waited = await alice.chat.completions.create(model="demo", messages=HELLO, max_tokens=2)
        assert waited.choices[0].finish_reason in ("stop", "length")
        await busy.close()
    async with AsyncOpenAI(base_url=base, api_key=ALICE, max_retries=0) as hasty:
        stream = await hasty.chat.completions.create(
            model="demo",
            messages=HELLO,
            stream=True,
            max_tokens=900,
            extra_body={"ignore_eos": True},
        )
        with pytest.raises(openai.RateLimitError):
            await hasty.chat.completions.create(model="demo", messages=HELLO)
        await stream.close()


async def test_the_client_retries_a_full_queue(tmp_path: Path) -> None:
    broker = EmbeddedServer(tmp_path / "nats")
    broker.start()
    tree = {
        "models": {"demo": {"path": str(MODEL)}},
        "delivery": {"max_queued": 1},
        "gateway": {"port": 0},
    }
    gateway = start_gateway_at(broker.url, tree, tmp_path)
    try:
        bus = await Bus.connect(broker.url, "test")
        # There is no worker that would claim it.
        await bus.publish_without_id(subjects.request("demo", "req-first"), b"{}")
        await bus.close()
        base = f"{gateway.url}/v1"
        async with AsyncOpenAI(base_url=base, api_key="none", max_retries=2) as client:
            with pytest.raises(openai.InternalServerError) as full:
                await client.chat.completions.create(model="demo", messages=HELLO)
        assert (full.value.status_code, full.value.code) == (503, "overloaded")
        assert full.value.response.headers["retry-after"] == "1"
        assert full.value.response.request.headers["x-stainless-retry-count"] == "2"
    finally:
        gateway.stop()
        broker.stop()


async def test_closing_a_stream_cancels_the_request(client: AsyncOpenAI, gateway: Gateway) -> None:
    stream = await client.chat.completions.create(
        model="demo",
        messages=HELLO,
        stream=True,
        max_tokens=900,
        n=8,
        extra_body={"ignore_eos": True},
    )
    request_id = stream.response.headers["x-request-id"]
    await anext(stream)
    await stream.close()
    status: Any = {"state": ""}
    while status["state"] not in ("finished", "cancelled", "failed"):
        status = await client.get(f"/requests/{request_id}", cast_to=object)
    assert status["state"] == "cancelled"

"""The official `anthropic` package against a gateway: an independent check of its answers."""

from collections.abc import AsyncIterator
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import AsyncAnthropic, beta_async_tool

from tests.gateway.conftest import Gateway, Start
from tests.gateway.http.test_auth import ALICE, KEYS
from tests.gateway.routes.test_chat import star_url
from tests.gateway.routes.test_openai_client import TOOLS as FUNCTIONS

STAR: Any = {
    "type": "image",
    "source": {
        "type": "base64",
        "media_type": "image/jpeg",
        "data": star_url().partition(",")[2],
    },
}
COLOUR: Any = [{"role": "user", "content": [STAR, {"type": "text", "text": "What colour is it?"}]}]
CACHED: Any = {"cache_control": {"type": "ephemeral"}}
TOOLS: Any = [
    {
        "name": tool["function"]["name"],
        "description": tool["function"].get("description", ""),
        "input_schema": tool["function"]["parameters"],
    }
    for tool in FUNCTIONS
]


@pytest.fixture
async def client(gateway: Gateway) -> AsyncIterator[AsyncAnthropic]:
    async with AsyncAnthropic(base_url=gateway.url, api_key="none", max_retries=0) as client:
        yield client


async def test_an_image_is_described_and_streamed(client: AsyncAnthropic) -> None:
    body: Any = {"model": "demo", "max_tokens": 64, "messages": COLOUR, "system": "Be brief."}
    answer = await client.messages.create(**body)
    (block,) = answer.content
    assert block.type == "text"
    assert "yellow" in block.text
    assert (answer.stop_reason, answer.stop_sequence) == ("end_turn", None)
    assert answer._request_id == answer.id
    counted = await client.messages.count_tokens(
        model="demo", messages=COLOUR, system=body["system"]
    )
    usage = answer.usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)
    async with client.messages.stream(**body) as stream:
        kinds = [event.type async for event in stream]
        final = await stream.get_final_message()
    assert [it.text for it in final.content if it.type == "text"] == [block.text]
    assert (final.stop_reason, final.usage.output_tokens) == ("end_turn", usage.output_tokens)
    assert (kinds[0], kinds[-1]) == ("message_start", "message_stop")
    assert kinds.index("content_block_start") < kinds.index("content_block_stop")
    stopped = await client.messages.create(**body, stop_sequences=["yellow"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "yellow")
    short = await client.messages.create(**body | {"max_tokens": 1})
    assert (short.stop_reason, short.usage.output_tokens) == ("max_tokens", 1)


async def test_tools_are_called_and_their_results_are_read(client: AsyncAnthropic) -> None:
    body: Any = {
        "model": "demo",
        "max_tokens": 200,
        "messages": COLOUR,
        "tools": TOOLS,
        "tool_choice": {"type": "any", "disable_parallel_tool_use": True},
    }
    answer = await client.messages.create(**body)
    (call,) = answer.content
    assert call.type == "tool_use"
    assert answer.stop_reason == "tool_use"
    assert call.input in ({"colour": "red"}, {"colour": "blue"}, {"round": True}, {"round": False})
    async with client.messages.stream(**body) as stream:
        final = await stream.get_final_message()
    (streamed,) = final.content
    assert streamed.type == "tool_use"
    assert (streamed.name, streamed.input) == (call.name, call.input)
    named = await client.messages.create(
        **body | {"tool_choice": {"type": "tool", "name": "measure"}}
    )
    assert [block.name for block in named.content if block.type == "tool_use"] == ["measure"]
    turns: Any = [*COLOUR, {"role": "assistant", "content": answer.content}]
    lengths = []
    for content in ([{"type": "text", "text": "See:"}], [{"type": "text", "text": "See:"}, STAR]):
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": content}
        results: Any = [*turns, {"role": "user", "content": [result]}]
        ended = await client.messages.create(model="demo", messages=results, max_tokens=8)
        usage = ended.usage
        lengths.append(usage.input_tokens + (usage.cache_read_input_tokens or 0))
    assert lengths[1] > lengths[0] + 8  # The model gets the image of the result.


async def test_the_clients_runner_of_tools_continues_without_a_thread(
    client: AsyncAnthropic,
) -> None:
    """It asks the server to keep the conversation, and sends the whole one after the refusal."""
    results: list[str] = []

    @beta_async_tool
    async def measure(round: bool) -> str:
        """Measure the shape."""
        results.append("3 cm")
        return results[-1]

    runner = client.beta.messages.tool_runner(
        model="demo",
        max_tokens=60,
        messages=COLOUR,
        tools=[measure],
        tool_choice={"type": "any"},
        max_iterations=2,
    )
    blocks = [message.content[0].type async for message in runner]
    assert blocks == ["tool_use", "tool_use"]
    assert results


async def test_an_agents_request_is_answered(client: AsyncAnthropic) -> None:
    """It has what agents for programming send, as in Claude Code."""
    call = {"type": "tool_use", "name": "paint", "input": {"colour": "red"}}
    result = {"type": "tool_result", "content": "done"}
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Paint two."} | CACHED]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "Well", "signature": "c2ln"},
                {"type": "text", "text": "Both:"},
                call | {"id": "toolu_1"},
                call | {"id": "toolu_2", "caller": {"type": "direct"}},
            ],
        },
        {
            "role": "user",
            "content": [
                result | {"tool_use_id": "toolu_1"},
                result | {"tool_use_id": "toolu_2", "is_error": True} | CACHED,
                {"type": "text", "text": "<system-reminder>Be brief.</system-reminder>"},
            ],
        },
    ]
    stream = await client.beta.messages.create(
        model="demo",
        max_tokens=4,
        messages=messages,
        system=[
            {"type": "text", "text": "x-anthropic-billing-header: cch=1;"},
            {"type": "text", "text": "You write programs."} | CACHED,
        ],
        tools=[tool | CACHED for tool in TOOLS],
        tool_choice={"type": "none"},
        thinking={"type": "adaptive"},
        context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
        output_config={"effort": "high"},
        metadata={"user_id": "user_1_account__session_2"},
        betas=["claude-code-20250219", "interleaved-thinking-2025-05-14"],
        stream=True,
    )
    events = [event async for event in stream]
    assert events[-1].type == "message_stop"
    assert events[-2].type == "message_delta"
    assert events[-2].usage.output_tokens == 4
    assert events[0].type == "message_start"
    # The same number as at the end, which counts the cached tokens separately.
    assert events[0].message.usage.input_tokens == sum(
        getattr(events[-2].usage, name) or 0 for name in ("input_tokens", "cache_read_input_tokens")
    )


async def test_a_stream_resumes_after_any_of_its_events(http: httpx.AsyncClient) -> None:
    body = {"model": "demo", "max_tokens": 8, "messages": COLOUR, "stream": True}
    headers = {"x-request-id": "msg-resumed"}
    whole = await http.post("/v1/messages", json=body, headers=headers)
    assert whole.headers["x-request-id"] == "msg-resumed"
    sent = whole.text.split("\n\n")[:-1]
    ids = [part.partition("id: ")[2].partition("\n")[0] for part in sent]
    for number in (0, 2, len(ids) - 2):
        rest = await http.post(
            "/v1/messages", json=body, headers=headers | {"last-event-id": ids[number]}
        )
        assert rest.text.split("\n\n")[:-1] == sent[number + 1 :]


async def test_errors_have_the_clients_own_types(client: AsyncAnthropic) -> None:
    hello: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(anthropic.NotFoundError) as unknown:
        await client.messages.create(model="other", messages=hello, max_tokens=4)
    assert unknown.value.body == {
        "type": "error",
        "error": {
            "type": "not_found_error",
            "message": "no model 'other'; there is: demo",
            "code": "unknown_model",
            "param": "model",
        },
    }
    assert (unknown.value.request_id or "").startswith("msg-")
    with pytest.raises(anthropic.BadRequestError, match="temperature"):
        await client.messages.create(
            model="demo", messages=hello, max_tokens=4, extra_body={"temperature": 9}
        )
    with pytest.raises(anthropic.BadRequestError, match="nonsense: unknown field"):
        await client.messages.create(
            model="demo", messages=hello, max_tokens=4, extra_body={"nonsense": 1}
        )
    broken = STAR | {"source": STAR["source"] | {"data": "AAAA"}}
    messages: Any = [*hello, {"role": "user", "content": [broken]}]
    for stream in (False, True):
        with pytest.raises(anthropic.BadRequestError) as damaged:
            await client.messages.create(
                model="demo", messages=messages, max_tokens=4, stream=stream
            )
        error: Any = damaged.value.body
        assert error["error"]["param"] == "messages[1].content[0].source"
    with pytest.raises(anthropic.BadRequestError, match="mcp_servers"):
        await client.messages.count_tokens(
            model="demo", messages=hello, extra_body={"mcp_servers": [{}]}
        )


async def test_models_in_the_clients_form(client: AsyncAnthropic) -> None:
    (model,) = [model async for model in client.models.list()]
    assert (model.type, model.id, model.max_input_tokens) == ("model", "demo", 1024)
    assert (await client.models.retrieve("demo")) == model


async def test_a_key_in_the_header_of_anthropics_api(another: Start) -> None:
    gateway = another(api_keys=KEYS)
    body = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "Hi"}]}
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False) as http:
        got = await http.post("/v1/messages", json=body, headers={"x-api-key": ALICE})
        assert got.status_code == 200
    async with AsyncAnthropic(base_url=gateway.url, api_key="no", max_retries=0) as stranger:
        with pytest.raises(anthropic.AuthenticationError) as refused:
            await stranger.messages.create(**body)  # type: ignore[call-overload]
    error: Any = refused.value.body
    assert error["error"]["type"] == "authentication_error"


async def test_any_error_of_a_client_with_the_header_has_its_form(http: httpx.AsyncClient) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    got = [
        await http.request(method, path, headers=headers)
        for method, path in (
            ("GET", "/v1/messages"),
            ("GET", "/v1/messages/x"),
            ("GET", "/v1/models/x"),
        )
    ]
    assert [(it.status_code, it.json()["type"], it.json()["error"]["code"]) for it in got] == [
        (405, "error", "method_not_allowed"),
        (404, "error", "unknown_url"),
        (404, "error", "unknown_model"),
    ]
    assert got[0].headers["allow"] == "POST"
    assert got[1].json()["error"]["type"] == "not_found_error"

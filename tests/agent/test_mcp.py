"""Responses with MCP tools: real servers, agents, gateway and broker, and a scripted model."""

import asyncio
import resource
from pathlib import Path
from typing import Any

import httpx
import nats
import openai
import pytest
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.errors import InvalidRequest
from shared.net.targets import Target
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.records import error_info
from shared.protocol.renderer_rpc import ErrorReply, Tokenized
from tests.agent.conftest import TOKEN, AgentRig, call
from tests.gateway.conftest import start_gateway_at
from workers.agent.mcp_client import Server

# Work queues are empty when a response has ended.
STREAMS = (
    subjects.STEPS_STREAM,
    subjects.TOKENS_STREAM,
    subjects.DEAD_STREAM,
    subjects.STAGES_STREAM,
    subjects.JOBS_STREAM,
    subjects.WORKERS_STREAM,
)


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * resource.getpagesize()


def mcp(label: str = "free", **fields: Any) -> Any:
    return {"type": "mcp", "server_label": label, **fields}


async def respond(client: AsyncOpenAI, text: Any, *tools: Any, **fields: Any) -> Any:
    return await client.responses.create(model="scripted", input=text, tools=tools, **fields)


async def test_the_model_calls_a_tool_and_answers_from_its_result(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    rig.scripts["2 + 3?"] = ["Let me see. " + call("free__add", a=2, b=3), "It is 5."]
    whole = await respond(openai_client, "2 + 3?", mcp())
    listed, text, tool_call, answer = whole.output
    assert [tool.name for tool in listed.tools] == ["add", "book", "meet", "fail"]
    assert text.content[0].text == "Let me see. "
    assert (tool_call.type, tool_call.name, tool_call.server_label) == ("mcp_call", "add", "free")
    assert (tool_call.status, tool_call.output, tool_call.error) == ("completed", "5", None)
    assert tool_call.arguments == '{"a": 2, "b": 3}'
    assert answer.content[0].text == "It is 5."
    assert whole.tools[0].headers is None
    assert rig.calls.headers[-1]["authorization"] == TOKEN
    assert rig.calls.headers[-1]["mcp-protocol-version"] == "2026-07-28"
    second = rig.model.requests[f"{whole.id}~t1"]
    assert [m.role for m in second.messages or []] == ["user", "assistant", "tool"]
    first = rig.model.requests[f"{whole.id}~t0"]
    assert [tool.function.name for tool in first.tools] == [
        "free__add",
        "free__book",
        "free__meet",
        "free__fail",
    ]
    assert second.tools == first.tools  # The prefix stays cached.

    events = await respond(openai_client, "2 + 3?", mcp(), stream=True)
    stream = [event async for event in events]
    kinds = [event.type.removeprefix("response.") for event in stream]
    assert kinds[2:6] == [
        "output_item.added",
        "mcp_list_tools.in_progress",
        "mcp_list_tools.completed",
        "output_item.done",
    ]
    assert "mcp_call.in_progress" in kinds
    assert kinds.index("mcp_call_arguments.done") < kinds.index("mcp_call.completed")
    final = stream[-1].response
    stored = await openai_client.responses.retrieve(final.id)
    assert stored == final
    items = [item.model_copy(update={"id": ""}) for item in whole.output]
    assert [item.model_copy(update={"id": ""}) for item in final.output] == items
    again = await openai_client.responses.retrieve(final.id, stream=True, starting_after=5)
    assert [event async for event in again] == stream[6:]


async def test_all_turns_of_a_response_have_the_trace_of_its_client(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    rig.scripts["traced?"] = [call("free__add", a=2, b=3), "It is 5."]
    headers = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "a=1"}
    client = await nats.connect(rig.broker.url)
    try:
        requests = await client.subscribe("pm.request.>")
        await client.flush()
        whole = await respond(openai_client, "traced?", mcp(), extra_headers=headers)
        for turn in range(2):
            message = await requests.next_msg(10)
            assert message.subject.endswith(f".{whole.id}~t{turn}")
            assert headers.items() <= (message.headers or {}).items()
    finally:
        await client.close()


async def test_control_tokens_end_the_call_and_not_the_response(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus
) -> None:
    def tokenize(data: bytes) -> bytes:
        if b"<|im_end|>" not in data:
            return to_json(Tokenized(1, 100, [1]))
        refusal = InvalidRequest("a control token", field="messages[0].content")
        return to_json(ErrorReply(error_info(refusal)))

    rig.scripts["Hello"] = [call("free__book", title="hello"), "I am sorry."]
    await agent_bus.add_responder(subjects.renderer("tokenize", "scripted"), tokenize)
    done = await respond(openai_client, "Hello", mcp())
    (booking,) = [item for item in done.output if item.type == "mcp_call"]
    assert (done.status, booking.status, booking.output) == ("completed", "failed", None)
    assert "control tokens" in booking.error.message
    result = (rig.model.requests[f"{done.id}~t1"].messages or [])[-1]
    assert result.content == booking.error.message


@pytest.mark.parametrize(
    ("allowed", "names"),
    [
        (None, ["add", "book", "meet", "fail"]),
        (["*"], ["add", "book", "meet", "fail"]),
        (["book"], ["book"]),
        ({"tool_names": ["add", "book"], "read_only": True}, ["add"]),
        ({"read_only": True}, ["add"]),
        ([], []),
        (["nope"], None),
    ],
)
async def test_the_forms_of_allowed_tools(
    rig: AgentRig, openai_client: AsyncOpenAI, allowed: Any, names: list[str] | None
) -> None:
    rig.scripts["Hello"] = [call("free__fail") + call("free__add", a=1, b=1), "Well."]
    if names is None:
        with pytest.raises(openai.BadRequestError, match="has no tool 'nope'"):
            await respond(openai_client, "Hello", mcp(allowed_tools=allowed))
        return
    done = await respond(openai_client, "Hello", mcp(allowed_tools=allowed))
    offered = rig.model.requests[f"{done.id}~t0"].tools
    assert [tool.function.name for tool in offered] == [f"free__{name}" for name in names]
    # A call of another tool is text.
    called = [item.name for item in done.output if item.type == "mcp_call"]
    assert called == [name for name in ("fail", "add") if name in names]


async def test_choices_limits_and_errors(rig: AgentRig, openai_client: AsyncOpenAI) -> None:
    rig.scripts["Fail"] = [call("free__fail"), "It failed."]
    failed = await respond(openai_client, "Fail", mcp())
    item = failed.output[1]
    assert (item.status, item.error.type) == ("failed", "mcp_tool_execution_error")
    assert "Error executing tool fail" in item.error.content[0]["text"]
    rig.scripts["Wrong"] = [call("free__add", a="x"), "Oh."]
    wrong = (await respond(openai_client, "Wrong", mcp())).output[1]
    assert wrong.status == "failed"

    choice: Any = {
        "type": "allowed_tools",
        "mode": "auto",
        "tools": [{"type": "mcp", "server_label": "free", "name": "add"}],
    }
    rig.scripts["Both"] = [call("free__book", title="x") + call("free__add", a=1, b=2), "Three."]
    limited = await respond(openai_client, "Both", mcp(), tool_choice=choice)
    request = rig.model.requests[f"{limited.id}~t0"]
    assert len(request.tools) == 4
    structure: Any = request.sampling_params.structured_outputs  # type: ignore[union-attr]
    assert "free__add" in structure.grammar
    assert "free__book" not in structure.grammar
    assert [item.name for item in limited.output if item.type == "mcp_call"] == ["add"]
    assert rig.calls.made["x"] == 0

    addition = call("free__add", a=1, b=1)
    rig.scripts["Often"] = [addition + addition, addition, addition]
    often = await respond(openai_client, "Often", mcp(), max_tool_calls=1)
    statuses = [item.status for item in often.output if item.type == "mcp_call"]
    assert statuses == ["completed", "failed"]
    assert rig.model.requests[f"{often.id}~t1"].tools == []

    closed = await respond(openai_client, "Hello", mcp("closed"))
    assert "cannot be reached" in closed.output[0].error
    named: Any = {"type": "mcp", "server_label": "closed"}
    with pytest.raises(openai.InternalServerError):
        await respond(openai_client, "Hello", mcp("closed"), tool_choice=named)
    outside = await respond(openai_client, "Hello", mcp("outside"))
    assert "not in agent.mcp_networks" in outside.output[0].error

    rig.scripts["Old"] = [call("old__old"), "Gold."]
    old = await respond(openai_client, "Old", mcp("old"))
    assert (old.output[1].output, old.output_text) == ("old but gold", "Gold.")

    for tool, code in (
        (mcp("none"), "there is no server"),
        (mcp("x", server_url="http://10.0.0.1/mcp"), "agent.mcp_hosts"),
        (mcp(headers={"A": "b"}), "stored with the response"),
        (mcp(authorization="b"), "stored with the response"),
        (mcp(connector_id="c"), "connector_id"),
    ):
        with pytest.raises(openai.BadRequestError, match=code):
            await respond(openai_client, "Hello", tool)


async def test_approvals_are_used_once_and_call_what_was_asked(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    rig.scripts["Book it"] = [call("calc__book", title="approved"), "not reached"]
    waiting = await respond(openai_client, "Book it", mcp("calc"))
    assert waiting.status == "completed"
    request = waiting.output[1]
    assert (request.type, request.name) == ("mcp_approval_request", "book")
    assert rig.calls.made["approved"] == 0
    decision: Any = {
        "type": "mcp_approval_response",
        "approval_request_id": request.id,
        "approve": True,
    }
    done = await respond(openai_client, [decision], mcp("calc"), previous_response_id=waiting.id)
    (item, *_) = done.output
    assert (item.type, item.status, item.approval_request_id) == (
        "mcp_call",
        "completed",
        request.id,
    )
    assert rig.calls.made["approved"] == 1
    # The first response has listed the tools, and the conversation has the call and its result.
    assert [item.type for item in done.output] == ["mcp_call", "message"]
    roles = [m.role for m in rig.model.requests[f"{done.id}~t0"].messages or []]
    assert roles == ["user", "assistant", "tool"]
    with pytest.raises(openai.ConflictError) as refused:
        await respond(openai_client, [decision], mcp("calc"), previous_response_id=waiting.id)
    assert refused.value.code == "approval_used"
    assert rig.calls.made["approved"] == 1
    forged = decision | {"approval_request_id": "mcpr_forged"}
    with pytest.raises(openai.BadRequestError):
        await respond(openai_client, [forged], mcp("calc"), previous_response_id=waiting.id)

    again = await respond(openai_client, "Book it", mcp("calc"))
    no = decision | {"approval_request_id": again.output[1].id, "approve": False, "reason": "late"}
    refusal = await respond(openai_client, [no], mcp("calc"), previous_response_id=again.id)
    messages = rig.model.requests[f"{refusal.id}~t0"].messages or []
    assert "I do not approve that call: late" in str(messages[-1].content)
    assert rig.calls.made["approved"] == 1


async def test_calls_of_one_turn_are_made_at_the_same_time(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    """Each waits for the other."""
    met = [call("free__meet", me="one", other="two"), call("free__meet", me="two", other="one")]
    rig.scripts["Meet"] = ["".join(met), "They met."]
    done = await respond(openai_client, "Meet", mcp())
    assert [item.output for item in done.output if item.type == "mcp_call"] == ["two", "one"]
    again = await openai_client.responses.retrieve(done.id, stream=True)
    assert [event async for event in again][-1].response == done


async def test_a_chain_of_twelve_turns_is_the_prompt_that_a_client_would_have_sent(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    expected: list[tuple[str, str]] = []
    last, names = None, []
    for number in range(12):
        text, image = f"Turn {number}", f"http://127.0.0.1/{number}.png"
        rig.scripts[text] = [call("free__add", a=number, b=1), f"It is {number + 1}."]
        parts = [
            {"type": "input_image", "image_url": image, "detail": "auto"},
            {"type": "input_text", "text": text},
        ]
        question = [{"role": "user", "content": parts}]
        last = await respond(openai_client, question, mcp(), previous_response_id=last)
        names.append(last.id)
        last = last.id
        expected += [("user", image), ("assistant", "add"), ("tool", str(number + 1))]
        turns = rig.model.requests[f"{last}~t1"].messages or []
        assert [message.role for message in turns] == [role for role, _ in expected]
        assert all(part in str(message) for message, (_, part) in zip(turns, expected, strict=True))
        expected.append(("assistant", f"It is {number + 1}."))
    await openai_client.responses.delete(names[5])
    with pytest.raises(openai.NotFoundError) as refused:
        await respond(openai_client, "And now?", previous_response_id=last)
    assert refused.value.code == "previous_response_not_found"


async def test_a_cancelled_call_has_an_unknown_outcome(
    rig: AgentRig, openai_client: AsyncOpenAI
) -> None:
    rig.scripts["Slowly"] = [call("free__book", title="slow", pause_s=2.5), "never"]
    started = await respond(openai_client, "Slowly", mcp(), background=True)
    await rig.calls.wait_for("slow")
    ended = await openai_client.responses.cancel(started.id)
    item: Any = ended.output[-1]
    assert (ended.status, item.status) == ("cancelled", "failed")
    assert "may have been carried out" in item.error.message
    # A client that leaves ends its response, unless that is in the background.
    rig.scripts["Leave"] = [call("free__book", title="left", pause_s=2.5), "never"]
    named = {"idempotency-key": "leave"}
    waiting = asyncio.ensure_future(respond(openai_client, "Leave", mcp(), extra_headers=named))
    await rig.calls.wait_for("left")
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    async with asyncio.timeout(10):
        while True:
            left = await respond(openai_client, "Leave", mcp(), extra_headers=named)
            if left.status == "cancelled":
                break
    rig.scripts["Late"] = [call("free__book", title="late", pause_s=9), "I do not know."]
    late = await respond(openai_client, "Late", mcp())
    assert "may have been carried out" in late.output[1].error.message
    assert late.output_text == "I do not know."
    tool = (rig.model.requests[f"{late.id}~t1"].messages or [])[-1]
    assert "may have been carried out" in str(tool.content)
    assert rig.calls.made["late"] == 1


async def test_no_secret_is_in_any_stream_or_log(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus
) -> None:
    rig.scripts["Secret"] = [call("free__add", a=1, b=1), "Two."]
    response = await respond(openai_client, "Secret", mcp())
    assert rig.calls.headers[-1]["authorization"] == TOKEN
    leaks = []
    for stream in STREAMS:
        leaks += [m for m in await agent_bus.read(stream, ">") if TOKEN.encode() in m.data]
    assert leaks == []
    subject = subjects.steps("", response.id)
    assert len(await agent_bus.read(subjects.STEPS_STREAM, subject)) >= 6
    logs = (rig.folder / "agent.log").read_text() + rig.gateway.log.read_text()
    assert TOKEN not in logs
    assert "ready" in logs
    async with httpx.AsyncClient(trust_env=False) as http:
        for beat in await agent_bus.heartbeats.read():
            if beat.metrics is not None:
                host, port = beat.metrics
                assert TOKEN not in (await http.get(f"http://{host}:{port}/metrics")).text
    assert resource.prlimit(rig.agents[-1].pid, resource.RLIMIT_CORE) == (0, 0)
    assert TOKEN not in repr(Server("", "l", Target("http", "h", 80, "/"), (("A", TOKEN),)))


async def test_a_full_store_refuses_and_steps_that_are_not_to_be_stored_expire(
    rig: AgentRig, openai_client: AsyncOpenAI, agent_bus: Bus, tmp_path: Path
) -> None:
    tree = rig.tree | {"agent": rig.tree["agent"] | {"max_stored": 1}}
    gateway = start_gateway_at(rig.broker.url, tree, tmp_path)
    try:
        async with AsyncOpenAI(
            base_url=f"{gateway.url}/v1", api_key="none", max_retries=0, timeout=60
        ) as client:
            stored = await respond(openai_client, "Keep", store=True)
            passing = await respond(openai_client, "Pass", store=False)
            for store in (True, False):
                # On a busy machine the first measure of what is stored takes long.
                async with asyncio.timeout(60):
                    while (code := await refusal_of(client, store=store)) is None:
                        pass
                assert code == "response_store_full"
            # The other gateway numbers the events alike.
            for response in (stored, passing):
                streams = [
                    await gate.responses.retrieve(response.id, stream=True)
                    for gate in (client, openai_client)
                ]
                mine, other = [[event async for event in stream] for stream in streams]
                assert mine == other
            with pytest.raises(openai.NotFoundError):
                await respond(client, "On", previous_response_id=passing.id)
    finally:
        gateway.stop()


async def refusal_of(client: AsyncOpenAI, *, store: bool) -> str | None:
    try:
        await respond(client, "More", store=store)
    except openai.InternalServerError as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("attack", "message"),
    [
        ("redirect", "307"),
        ("endless", "more than 1 MiB"),
        ("events", "events"),
        ("drip", "no answer in time"),
        ("many", "128 tools"),
        ("most", "too large"),
        ("deep", "too large"),
        ("foreign", "another document"),
        ("nameless", "printable"),
    ],
)
async def test_attacks_are_one_error_each(
    rig: AgentRig, openai_client: AsyncOpenAI, attack: str, message: str
) -> None:
    before = resident_bytes(rig.agents[-1].pid)
    done = await respond(openai_client, "Hello there", mcp(attack))
    assert message in done.output[0].error
    assert done.output_text == "Done."
    assert rig.agents[-1].poll() is None
    assert resident_bytes(rig.agents[-1].pid) < before + 64 * 2**20


async def test_a_response_that_cannot_continue_says_why(openai_client: AsyncOpenAI) -> None:
    choice: Any = {"type": "mcp", "server_label": "closed"}
    with pytest.raises(openai.InternalServerError) as failed:
        await respond(openai_client, "2 + 3?", mcp("closed"), tool_choice=choice)
    body: Any = failed.value.body
    assert (failed.value.code, body["message"]) == (
        "tools_unavailable",
        "tool_choice needs the tools of closed: the server cannot be reached (ConnectError)",
    )

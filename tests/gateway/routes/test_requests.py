"""Streams that resume after a broken connection, a killed gateway or a killed engine."""

import asyncio
import contextlib
import json
import os
import signal
import time
from typing import Any

import httpx

from shared.bus.bus import Bus
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import Fenced
from shared.protocol import subjects
from shared.protocol.messages import RequestRecord
from shared.state import request_registry
from shared.state.token_log import last_record
from tests.cluster.conftest import Cluster, stopped
from tests.gateway.conftest import WITH_IDS, Start, free_port
from tests.gateway.routes.test_chat import events, question
from tests.support.waiting import until

PATH = "/v1/chat/completions"
LONG = {"stream": True, "n": 2, "seed": 5, "temperature": 1.0, "max_tokens": 300}


def long(**fields: Any) -> dict[str, Any]:
    return question("Describe it.") | LONG | {"ignore_eos": True} | fields


def texts(chunks: list[tuple[str, Any]]) -> dict[int, str]:
    index_to_text: dict[int, str] = {}
    for _, chunk in chunks:
        if chunk != "[DONE]":
            for choice in chunk["choices"]:
                text = choice["delta"].get("content", "")
                index_to_text[choice["index"]] = index_to_text.get(choice["index"], "") + text
    return index_to_text


async def begin(
    http: httpx.AsyncClient, headers: dict[str, str], count: int, **fields: Any
) -> tuple[str, list[tuple[str, Any]]]:
    """Return the request's id and the first events of its stream, and close the connection."""
    got: list[tuple[str, Any]] = []
    async with http.stream("POST", PATH, json=long(**fields), headers=headers) as stream:
        assert stream.status_code == 200
        text = ""
        async for line in stream.aiter_lines():
            text += line + "\n"
            if line == "" and len(got := events(text)) >= count:
                break
        return stream.headers["x-request-id"], got


async def state_of(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    return dict((await http.get(f"/v1/requests/{request_id}")).json())


async def ended(http: httpx.AsyncClient, request_id: str) -> dict[str, Any]:
    deadline = time.monotonic() + 60
    while (status := await state_of(http, request_id))["state"] in ("queued", "running"):
        assert time.monotonic() < deadline, status
        await asyncio.sleep(0.1)
    return status


async def test_a_closed_connection_cancels(http: httpx.AsyncClient) -> None:
    request_id, _ = await begin(http, {}, 2, max_tokens=900)
    status = await ended(http, request_id)
    assert status["state"] == "cancelled"
    assert status["error"]["code"] == "cancelled"


async def test_a_closed_connection_cancels_a_request_that_is_not_streamed(
    http: httpx.AsyncClient,
) -> None:
    named = {"x-request-id": f"left-{time.time_ns()}"}
    body = long(stream=False, max_tokens=900, n=8)
    asking = asyncio.create_task(http.post(PATH, json=body, headers=named))
    while (await http.get(f"/v1/requests/{named['x-request-id']}")).status_code == 404:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    assert (await ended(http, named["x-request-id"]))["state"] == "cancelled"
    again = await http.post(PATH, json=body, headers=named)
    assert (again.status_code, again.json()["error"]["code"]) == (400, "cancelled")


async def test_an_id_belongs_to_the_first_request_that_used_it(http: httpx.AsyncClient) -> None:
    """A proxy may pass on the same trace id with several requests."""
    named = {"x-request-id": f"trace-{time.time_ns()}"}
    body = question("Describe it.") | {"max_tokens": 4}
    first = await http.post(PATH, json=body, headers=named)
    again = await http.post(PATH, json=body, headers=named)
    assert (again.status_code, again.json()) == (200, first.json())
    for other in (body | question("What colour is it?"), body | {"max_tokens": 5}):
        refused = await http.post(PATH, json=other | {"stream": True}, headers=named)
        assert (refused.status_code, refused.json()["error"]["code"]) == (422, "request_id_reused")
    # All endpoints share the ids.
    prompts = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 2}
    assert (await http.post("/v1/completions", json=prompts, headers=named)).status_code == 422
    named = {"x-request-id": f"trace-{time.time_ns()}"}
    assert (await http.post("/v1/completions", json=prompts, headers=named)).status_code == 200
    prompts["prompt"] = ["a", "c"]
    assert (await http.post("/v1/completions", json=prompts, headers=named)).status_code == 422


async def test_a_client_refused_an_id_does_not_keep_its_request_alive(
    http: httpx.AsyncClient,
) -> None:
    named = {"x-request-id": f"trace-{time.time_ns()}"}
    body = long(max_tokens=900, n=8)
    async with http.stream("POST", PATH, json=body, headers=named) as stream:
        lines = stream.aiter_lines()
        await anext(lines)
        refused = await http.post(PATH, json=body | {"seed": 6}, headers=named)
        assert refused.json()["error"]["code"] == "request_id_reused"
        assert (await state_of(http, named["x-request-id"]))["state"] == "running"
    assert (await ended(http, named["x-request-id"]))["state"] == "cancelled"


async def test_a_durable_request_continues_without_its_client(http: httpx.AsyncClient) -> None:
    request_id, begun = await begin(http, {}, 2, durable=True)
    url = f"/v1/requests/{request_id}/stream"
    rest = events((await http.get(url, headers={"last-event-id": begun[-1][0]})).text)
    status = await ended(http, request_id)
    assert (status["state"], status["durable"], status["object"]) == ("finished", True, "request")
    whole = {c["index"]: c["message"]["content"] for c in status["result"]["choices"]}
    assert texts(begun + rest) == whole
    # Read from the beginning, and from any record.
    replayed = events((await http.get(url)).text)
    assert replayed == begun + rest
    middle = int(replayed[len(replayed) // 2][0])
    assert events((await http.get(url, params={"from": middle})).text) == [
        event for event in replayed if event[1] == "[DONE]" or int(event[0]) >= middle
    ]


async def append_foreign(bus: Bus, request_id: str, data: bytes) -> None:
    while True:
        stored = await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens(request_id))
        assert stored is not None
        # Tokens that the engine sent before it was stopped may still arrive.
        with contextlib.suppress(Fenced):
            await bus.append(subjects.append(request_id), data, stored.sequence)
            return


async def test_a_request_with_foreign_messages_in_its_log_finishes(
    http: httpx.AsyncClient, cluster: Cluster, bus: Bus
) -> None:
    engine = await cluster.pid(bus, "engine")
    request_id, _ = await begin(http, {}, 2, durable=True, max_tokens=900)
    # Otherwise the engine might write between the two, or come to its end.
    with stopped(engine):
        last = await last_record(bus, request_id)
        assert last is not None
        later = {"type": "a later kind", "index": last.index + 1, "attempt": last.attempt}
        for data in (json.dumps(later).encode(), b"\xff"):
            await append_foreign(bus, request_id, data)
        await bus.heartbeats.publish("foreign-gateway-test", b"\xff")
        first = await http.get(f"/v1/requests/{request_id}")
        assert (first.status_code, first.json()["state"]) == (200, "running")
    status = await ended(http, request_id)
    assert status["state"] == "finished", status
    chunks = events((await http.get(f"/v1/requests/{request_id}/stream")).text)
    whole = {c["index"]: c["message"]["content"] for c in status["result"]["choices"]}
    assert texts(chunks) == whole
    async with asyncio.timeout(30):
        while await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id)):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_event_ids_are_sent_to_clients_that_can_use_them(http: httpx.AsyncClient) -> None:
    async def ids(body: dict[str, Any], **headers: str) -> set[str]:
        answer = await http.post(PATH, json=body, headers={"accept": "*/*"} | headers)
        *chunks, _ = events(answer.text)
        return {event_id for event_id, _ in chunks}

    short = question() | {"stream": True, "max_tokens": 2, "temperature": 0.0}
    assert await ids(short) == {""}
    assert "" not in await ids(short, accept="text/event-stream")
    assert "" not in await ids(short | {"durable": True})
    assert "" not in await ids(short, **{"last-event-id": "-1"})


async def test_the_same_id_names_the_same_request(http: httpx.AsyncClient) -> None:
    named = {"idempotency-key": f"once-{time.time_ns()}"}
    first_id, begun = await begin(http, named, 2, durable=True)
    answer = await http.post(PATH, json=long(), headers=named | {"last-event-id": begun[-1][0]})
    assert answer.headers["x-request-id"] == first_id
    replayed = await http.get(f"/v1/requests/{first_id}/stream")
    assert events(replayed.text) == begun + events(answer.text)


async def test_delete_cancels(http: httpx.AsyncClient) -> None:
    request_id, _ = await begin(http, {}, 1, durable=True, max_tokens=900)
    assert (await state_of(http, request_id))["state"] == "running"
    assert (await http.delete(f"/v1/requests/{request_id}")).status_code == 202
    assert (await ended(http, request_id))["state"] == "cancelled"
    chunks = events((await http.get(f"/v1/requests/{request_id}/stream?from=0")).text)
    assert chunks[-1][1] == "[DONE]"
    assert chunks[-2][1]["error"]["code"] == "cancelled"


async def test_an_invalid_id_is_refused(http: httpx.AsyncClient) -> None:
    for bad in ("x", "1,2", "-5", "9" * 40):
        got = await http.post(PATH, json=long(), headers={"last-event-id": bad})
        assert (got.status_code, got.json()["error"]["param"]) == (400, "Last-Event-ID")
    assert (await http.get("/v1/requests/a.b*")).status_code == 404


async def test_another_gateway_continues_after_one_is_killed(
    another: Start, http: httpx.AsyncClient
) -> None:
    port = free_port()
    named = WITH_IDS | {"x-request-id": f"survivor-{time.time_ns()}"}
    doomed = another(port)
    text = ""
    async with httpx.AsyncClient(base_url=doomed.url, timeout=60, trust_env=False) as client:
        try:
            async with client.stream("POST", PATH, json=long(), headers=named) as stream:
                async for line in stream.aiter_lines():
                    text += line + "\n"
                    if line == "" and len(events(text)) == 3:
                        doomed.stop(signal.SIGKILL)
        except httpx.HTTPError:
            pass
    begun = events(text)
    assert begun[-1][1] != "[DONE]"
    answer = await http.post(PATH, json=long(), headers=named | {"last-event-id": begun[-1][0]})
    rest = events(answer.text)
    assert rest[-1][1] == "[DONE]"
    whole = events((await http.get(f"/v1/requests/{answer.headers['x-request-id']}/stream")).text)
    assert whole == begun + rest


async def chat_amid_a_kill(
    http: httpx.AsyncClient, cluster: Cluster, bus: Bus
) -> tuple[list[tuple[str, Any]], int]:
    """Kill the engine of a stream; return the stream's events and the number of attempts."""
    text, killed = "", False
    async with http.stream("POST", PATH, json=long()) as stream:
        async for line in stream.aiter_lines():
            text += line + "\n"
            if not killed and line == "" and len(events(text)) == 3:
                os.kill(await cluster.pid(bus, "engine"), signal.SIGKILL)
                killed = True
        request_id = stream.headers["x-request-id"]
    assert killed
    return events(text), (await ended(http, request_id))["attempt"]


async def test_a_stream_continues_when_its_engine_is_killed(
    http: httpx.AsyncClient, cluster: Cluster, bus: Bus
) -> None:
    # The engine may have ended before the test reads the third event.
    for _ in range(4):
        chunks, attempts = await chat_amid_a_kill(http, cluster, bus)
        assert chunks[-1][1] == "[DONE]", chunks[-2:]
        ids = [int(event_id) for event_id, _ in chunks[:-1]]
        assert ids == sorted(set(ids))
        if attempts > 1:
            break
    assert attempts > 1
    undisturbed = await http.post(PATH, json=long(stream=False))
    whole = {c["index"]: c["message"]["content"] for c in undisturbed.json()["choices"]}
    # The seed is given, so the text does not show that two engines wrote it.
    assert texts(chunks) == whole


async def test_a_truncated_log_is_reported(http: httpx.AsyncClient, bus: Bus) -> None:
    body = {"model": "demo", "prompt": ["a", "b"], "max_tokens": 40}
    request_id = (await http.post("/v1/completions", json=body)).headers["x-request-id"]
    # Both logs, because either may be read first.
    for choice in (f"{request_id}~0", f"{request_id}~1"):
        last = await last_record(bus, choice)
        assert last is not None
        assert last.index > 0
        stored = await bus.read(subjects.TOKENS_STREAM, subjects.tokens(choice), 1)
        await bus.delete(subjects.TOKENS_STREAM, stored[0].sequence)
    answer = await http.get(f"/v1/requests/{request_id}/stream")
    assert (answer.status_code, answer.json()["error"]["code"]) == (410, "log_truncated")


async def test_a_request_whose_log_was_removed_is_not_found(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    request_id = f"chatcmpl-{time.time_ns()}"
    await request_registry.register(
        bus, request_id, RequestRecord("chat", "demo", "", 1, True), "gateway-dead:a"
    )
    for path in ("", "/stream"):
        answer = await http.get(f"/v1/requests/{request_id}{path}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")


async def test_a_broken_connection_does_not_cancel_a_request_that_continued_elsewhere(
    another: Start, http: httpx.AsyncClient
) -> None:
    named = WITH_IDS | {"x-request-id": f"thawed-{time.time_ns()}"}
    frozen = another()
    body = long(max_tokens=900, n=8)
    async with httpx.AsyncClient(base_url=frozen.url, timeout=60, trust_env=False) as client:
        text = ""
        async with client.stream("POST", PATH, json=body, headers=named) as stream:
            async for line in stream.aiter_lines():
                text += line + "\n"
                if line == "" and len(events(text)) == 3:
                    break
            frozen.process.send_signal(signal.SIGSTOP)
            begun = events(text)
            resume = named | {"last-event-id": begun[-1][0]}
            rest = ""
            async with http.stream("POST", PATH, json=body, headers=resume) as other:
                async for line in other.aiter_lines():
                    if not rest:
                        await stream.aclose()
                        frozen.process.send_signal(signal.SIGCONT)
                    rest += line + "\n"
                request_id = other.headers["x-request-id"]
    chunks = events(rest)
    assert chunks[-1][1] == "[DONE]"
    assert "error" not in chunks[-2][1], chunks[-2]
    assert events((await http.get(f"/v1/requests/{request_id}/stream")).text) == begun + chunks


async def test_a_request_that_could_not_be_recorded_is_cancelled(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    """The client is asked to try again, so no client waits for the first request."""
    cancels: list[str] = []
    await bus.watch_subjects(subjects.CANCELS_FILTER, cancels.append)
    await bus.connection.js.delete_stream(subjects.JOBS_STREAM)
    try:
        answer = await http.post(PATH, json=long(max_tokens=900))
    finally:
        await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "unavailable")
    await until(lambda: cancels, 10)
    assert [subjects.last_token(subject)[:9] for subject in cancels] == ["chatcmpl-"]


async def test_a_record_without_a_published_request_is_not_waited_for(
    http: httpx.AsyncClient, bus: Bus
) -> None:
    """The gateway died between the two."""
    request_id = f"chatcmpl-{time.time_ns()}"
    now_s = int(bus.now_ms() / 1000)
    note = RequestRecord("chat", "demo", "", now_s - 20, False, {}, 2.0)
    await request_registry.register(bus, request_id, note, "gateway-dead:a")
    for path in ("", "/stream"):
        assert (await http.get(f"/v1/requests/{request_id}{path}")).status_code == 404

"""A tenant reads and cancels its requests over HTTP and over NATS, whichever way they came."""

import json
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import pytest
from nats.aio.client import Client
from nats.aio.subscription import Subscription

from shared.bus.bus import Bus
from shared.protocol.messages import DeadLetter
from shared.state import dead_letters
from tests.cluster.conftest import Cluster, sign_in
from tests.gateway.conftest import WITH_IDS, Gateway, Start, start_gateway
from tests.gateway.http.test_auth import ALICE, BOB, KEYS, bearer
from tests.gateway.routes.test_chat import events
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
ABORT = "/inference/v1/abort_requests"
LONG = {"max_tokens": 900, "ignore_eos": True}
QUESTION = [{"role": "user", "content": "What can you do?"}]


@pytest.fixture(scope="module")
def gateway(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    """A gateway whose callers belong to the tenant of the NATS client."""
    running = start_gateway(cluster, tmp_path_factory.mktemp("gateway"), tenant="local")
    yield running
    running.stop()


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[Client]:
    client = await sign_in(cluster, cluster.client_key)
    yield client
    await client.close()


@pytest.fixture
def name() -> str:
    return f"order-{secrets.token_hex(4)}"


async def publish(nc: Client, name: str, **fields: Any) -> None:
    body = {"model": "demo", "messages": QUESTION} | fields
    await nc.jetstream().publish(f"pm.request.demo.{name}", json.dumps(body).encode())


async def read(nc: Client, name: str) -> list[dict[str, Any]]:
    page = json.loads((await nc.request(f"pm.read.{name}", timeout=60)).data)
    records: list[dict[str, Any]] = page["records"]
    assert page["ended"]
    return records


async def refusal(http: httpx.AsyncClient, name: str) -> Any:
    """Send a request with an id over HTTP, and return the error."""
    body = {"model": "demo", "max_tokens": 4, "messages": QUESTION}
    answer = await http.post(CHAT, json=body, headers={"x-request-id": name}, timeout=60)
    assert answer.status_code >= 400, answer.text
    return answer.json()["error"]


async def error_in(log: Subscription) -> dict[str, Any]:
    while (record := json.loads((await log.next_msg(60)).data))["type"] == "tokens":
        pass
    error: dict[str, Any] = record["error"]
    return error


def is_in(state: str, http: httpx.AsyncClient, name: str) -> Callable[[], Any]:
    async def condition() -> Any:
        answer = await http.get(f"/v1/requests/{name}")
        assert answer.status_code == 200, answer.text
        return answer.json() if answer.json()["state"] == state else None

    return condition


async def test_a_request_over_nats_is_found_over_http(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    await publish(nc, name)
    body = await until(is_in("finished", http, name))
    records = await read(nc, name)
    assert body["result"] == {"data": records, "object": "list"}
    assert (body["id"], body["model"], body["records"]) == (name, "demo", len(records))
    assert [entry["stage"] for entry in body["path"]] == ["coordinator", "renderer", "engine"]
    stream = await http.get(f"/v1/requests/{name}/stream")
    numbered = [(str(record["index"]), record) for record in records]
    assert events(stream.text) == [*numbered, ("", "[DONE]")]
    assert stream.headers["x-request-id"] == name
    for position in ({"params": {"from": 1}}, {"headers": {"last-event-id": "0"}}):
        rest = await http.get(f"/v1/requests/{name}/stream", **position)
        assert events(rest.text) == [*numbered[1:], ("", "[DONE]")]


async def test_a_request_over_http_is_read_over_nats(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 16}
    answer = await http.post(CHAT, json=body, headers={"x-request-id": name}, timeout=60)
    texts = [
        choice["text"] for record in await read(nc, name) for choice in record.get("choices", [])
    ]
    assert "".join(texts) == answer.json()["choices"][0]["message"]["content"] != ""
    state = json.loads((await nc.request(f"pm.state.{name}", timeout=60)).data)
    assert (state["state"], state["model"]) == ("finished", "demo")


async def test_a_request_over_nats_is_cancelled_over_http(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    log = await nc.subscribe(f"pm.tokens.{name}")
    await publish(nc, name, sampling_params=LONG)
    await log.next_msg(60)
    assert (await http.delete(f"/v1/requests/{name}")).status_code == 202
    assert (await error_in(log))["code"] == "cancelled"
    body = await until(is_in("cancelled", http, name))
    assert body["error"]["code"] == "cancelled"
    stream = events((await http.get(f"/v1/requests/{name}/stream")).text)
    assert [data if data == "[DONE]" else data["error"]["code"] for _, data in stream[-2:]] == [
        "cancelled",
        "[DONE]",
    ]


@pytest.mark.parametrize("length", [20, 128])
async def test_a_request_over_nats_is_aborted_over_http(
    nc: Client, http: httpx.AsyncClient, name: str, length: int
) -> None:
    name = name.ljust(length, "x")
    log = await nc.subscribe(f"pm.tokens.{name}")
    await publish(nc, name, sampling_params=LONG)
    await log.next_msg(60)
    aborted = await http.post(ABORT, json={"request_ids": ["never-heard-of", name]})
    assert aborted.status_code == 200
    assert (await error_in(log))["code"] == "cancelled"


async def test_all_prompts_of_a_request_are_aborted(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    logs = [await nc.subscribe(f"pm.tokens.{name}~{part}") for part in range(2)]
    body = {"model": "demo", "prompt": ["a", "b"], "stream": True} | LONG
    headers = {"x-request-id": name}
    async with http.stream("POST", "/v1/completions", json=body, headers=headers):
        for log in logs:
            await log.next_msg(60)
        await http.post(ABORT, json={"request_ids": [name]})
        assert [(await error_in(log))["code"] for log in logs] == ["cancelled"] * 2


async def test_a_request_is_no_alias_of_another_name(http: httpx.AsyncClient, name: str) -> None:
    body = {"model": "demo", "token_ids": [1, 2, 3], "sampling_params": {"max_tokens": 2}}
    headers = {"x-request-id": f"alias_of:{name}"}
    answer = await http.post("/inference/v1/generate", json=body, headers=headers, timeout=60)
    assert answer.status_code == 200, answer.text
    assert (await http.post(ABORT, json={"request_ids": [name]})).status_code == 200
    body["request_id"] = name
    answer = await http.post("/inference/v1/generate", json=body, timeout=60)
    assert answer.status_code == 200, answer.text


async def test_an_id_that_is_only_aborted_is_free(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    assert (await http.post(ABORT, json={"request_ids": [name]})).status_code == 200
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 4}
    answer = await http.post(CHAT, json=body, headers={"x-request-id": name}, timeout=60)
    assert answer.status_code == 200, answer.text


async def test_a_cancellation_before_a_request_over_http_ends_it(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    log = await nc.subscribe(f"pm.tokens.{name}")
    await nc.jetstream().publish(f"pm.cancel.{name}", b"")
    assert (await error_in(log))["code"] == "cancelled"
    assert (await refusal(http, name))["code"] == "cancelled"


async def test_a_failed_request_over_nats_has_its_error_over_http(
    nc: Client, http: httpx.AsyncClient, name: str
) -> None:
    await publish(nc, name, messages=[])
    body = await until(is_in("failed", http, name))
    (record,) = await read(nc, name)
    error = record["error"]
    assert (body["error"]["code"], body["error"]["param"]) == (error["code"], error["field"])
    assert body["error"]["message"] == error["message"]


async def test_other_tenants_do_not_find_a_request_over_nats(
    nc: Client, another: Start, name: str
) -> None:
    gateway = another(api_keys=[KEYS[0] | {"tenant": "local"}, KEYS[1]])
    await publish(nc, name)
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, headers=WITH_IDS) as http:
        for method, suffix in (("GET", ""), ("GET", "/stream"), ("DELETE", "")):
            url = f"/v1/requests/{name}{suffix}"
            hidden = await http.request(method, url, headers=bearer(BOB))
            assert (hidden.status_code, hidden.json()["error"]["code"]) == (404, "not_found")
            own = await http.request(method, url, headers=bearer(ALICE))
            assert own.status_code in (200, 202)


async def test_all_records_in_one_answer_have_a_limit(
    nc: Client, another: Start, name: str
) -> None:
    gateway = another(tenant="local", max_answer_mib=1)
    sampling = {"max_tokens": 400, "ignore_eos": True, "logprobs": 20, "n": 8}
    await publish(nc, name, sampling_params=sampling)
    async with httpx.AsyncClient(base_url=gateway.url, trust_env=False, headers=WITH_IDS) as http:

        async def has_ended() -> bool:
            return (await http.get(f"/v1/requests/{name}")).status_code != 200

        await until(has_ended)
        answer = await http.get(f"/v1/requests/{name}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "answer_too_large")
        assert "a stream has no limit" in answer.json()["error"]["message"]
        stream = await http.get(f"/v1/requests/{name}/stream", timeout=60)
        assert events(stream.text)[-2][1]["type"] == "finish"


async def text_of_chat(nc: Client, http: httpx.AsyncClient, name: str, way: str) -> str:
    if way == "nats":
        log = await nc.subscribe(f"pm.tokens.{name}")
        await publish(nc, name, sampling_params={"max_tokens": 8, "temperature": 0})
        while json.loads((await log.next_msg(60)).data)["type"] == "tokens":
            pass
        records = await read(nc, name)
        return "".join(c["text"] for record in records for c in record.get("choices", []))
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 8, "temperature": 0}
    answer = await http.post(CHAT, json=body, headers={"x-request-id": name}, timeout=60)
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


async def texts_of_prompts(http: httpx.AsyncClient, name: str) -> list[str]:
    prompts = ["one two three", "red green blue"]
    body = {"model": "demo", "prompt": prompts, "max_tokens": 8, "temperature": 0}
    headers = {"x-request-id": name}
    answer = await http.post("/v1/completions", json=body, headers=headers, timeout=60)
    return [choice["text"] for choice in answer.json()["choices"]]


@pytest.mark.parametrize("way", ["http", "nats"])
@pytest.mark.parametrize("prompts_first", [True, False])
async def test_requests_and_prompts_of_another_request_have_separate_ids(
    nc: Client, http: httpx.AsyncClient, name: str, way: str, prompts_first: bool
) -> None:
    chat = await text_of_chat(nc, http, secrets.token_hex(8), way)
    prompts = await texts_of_prompts(http, secrets.token_hex(8))
    assert chat not in prompts
    names = [f"{name}-0", f"{name}-1", *[f"{name}~0"] * (way == "http")]
    if prompts_first:
        assert await texts_of_prompts(http, name) == prompts
    assert [await text_of_chat(nc, http, each, way) for each in names] == [chat] * len(names)
    assert await texts_of_prompts(http, name) == prompts


async def test_a_client_cannot_take_the_id_of_a_prompt(
    nc: Client, http: httpx.AsyncClient, bus: Bus, name: str
) -> None:
    await publish(nc, f"{name}~0")
    letter = await until(lambda: letter_at(bus, f"pm.request.@local.key.demo.{name}~0"))
    assert (letter.request_id, letter.error.field) == (None, "request_id")
    prompts = await texts_of_prompts(http, secrets.token_hex(8))
    assert await texts_of_prompts(http, name) == prompts
    # It names the prompt, whose records the tenant may read.
    assert (await read(nc, f"{name}~1"))[-1]["type"] == "finish"
    state = json.loads((await nc.request(f"pm.state.{name}~1", timeout=60)).data)
    assert state["state"] == "finished"
    body = (await http.get(f"/v1/requests/{name}~1")).json()
    assert (body["id"], body["state"]) == (f"{name}~1", "finished")


async def letter_at(bus: Bus, subject: str) -> DeadLetter | None:
    letters = [letter async for _, _, letter in dead_letters.read_newest(bus, 20)]
    return next((letter for letter in letters if letter.subject == subject), None)

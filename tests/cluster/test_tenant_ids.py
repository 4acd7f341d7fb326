"""Tenants that use one request id: a stock NATS client of each gets its own answer."""

import asyncio
import json
import secrets
from pathlib import Path
from typing import Any

import httpx
import pytest
from nats.aio.client import Client

from tests import preloaded
from tests.cluster.conftest import Cluster, sign_in

QUESTIONS = {"a": "What can you do?", "b": "Who are you?"}


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> dict[str, Path]:
    """Files of the keys of two tenants."""
    options = ("--config", str(cluster.config), "--dir", str(cluster.keys))
    files = {}
    for name in QUESTIONS:
        done = preloaded.run("keys", "add-tenant", name, *options, cwd=cluster.config.parent)
        files[name] = Path(done.stdout.strip())
    return files


def body_of(question: str) -> bytes:
    messages = [{"role": "user", "content": question}]
    sampling = {"temperature": 0.0, "max_tokens": 24}
    body = {"model": "demo", "messages": messages, "sampling_params": sampling}
    return json.dumps(body).encode()


async def ask(nc: Client, request_id: str, question: str) -> str:
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    # The same message id for both.
    stored = await nc.jetstream().publish(
        f"pm.request.demo.{request_id}", body_of(question), headers={"Nats-Msg-Id": request_id}
    )
    assert not stored.duplicate
    text, record = "", await next_record(log)
    while record["type"] == "tokens":
        text += "".join(choice["text"] for choice in record["choices"])
        record = await next_record(log)
    assert record["type"] == "finish"
    return text


async def next_record(log: Any) -> dict[str, Any]:
    record: dict[str, Any] = json.loads((await log.next_msg(timeout=60)).data)
    return record


async def test_tenants_with_one_id_get_their_own_answers(
    cluster: Cluster, keys: dict[str, Path]
) -> None:
    clients = {name: await sign_in(cluster, keys[name]) for name in keys}
    alone = {
        name: await ask(clients[name], f"alone-{secrets.token_hex(8)}", QUESTIONS[name])
        for name in keys
    }
    assert alone["a"] != alone["b"]
    for _ in range(3):
        request_id = f"order-{secrets.token_hex(4)}"
        answers = await asyncio.gather(
            *(ask(clients[name], request_id, QUESTIONS[name]) for name in keys)
        )
        assert answers == [alone[name] for name in keys]
    for client in clients.values():
        await client.close()


async def test_no_tenant_silences_an_id_of_a_gateways_request(
    cluster: Cluster, keys: dict[str, Path]
) -> None:
    name = f"order-{secrets.token_hex(4)}"
    attacker = await sign_in(cluster, keys["a"])
    await ask(attacker, name, QUESTIONS["a"])
    await attacker.close()
    async with httpx.AsyncClient(base_url=cluster.http_url, trust_env=False) as http:
        question = {"role": "user", "content": QUESTIONS["b"]}
        body = {"model": "demo", "messages": [question], "max_tokens": 24}
        answered = await http.post(
            "/v1/chat/completions", json=body, headers={"X-Request-Id": name}, timeout=60
        )
    assert answered.status_code == 200, answered.text
    assert answered.json()["choices"][0]["message"]["content"]


async def test_no_tenant_swallows_a_cancellation(cluster: Cluster, keys: dict[str, Path]) -> None:
    request_id = f"cancelled-{secrets.token_hex(4)}"
    for name, key in keys.items():
        nc = await sign_in(cluster, key)
        log = await nc.subscribe(f"pm.tokens.{request_id}")
        # The same message id for both.
        await nc.jetstream().publish(f"pm.cancel.{request_id}", headers={"Nats-Msg-Id": request_id})
        record = await next_record(log)
        assert record["error"]["code"] == "cancelled", name
        await nc.close()

"""Ids of other systems, used by clients of two tenants that share no code with Pagemill."""

import ast
import asyncio
import json
import secrets
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import ops.chaos.plain_client
from ops.chaos.plain_client import PlainClient, body_of
from tests import preloaded
from tests.cluster.conftest import ROOT, Cluster, sign_in
from tests.npm import install, needs_npm, run
from tests.support.waiting import until

QUESTIONS = {"one": "What can you do?", "two": "Who are you?"}
VALID = {
    "UUID": lambda: str(uuid.uuid4()),
    "UUID without hyphens": lambda: uuid.uuid4().hex.upper(),
    "ULID": lambda: (
        "01JD" + "".join(secrets.choice("0123456789ABCDEFGHJKMNPQRS") for _ in "x" * 22)
    ),
    "number": lambda: str(secrets.randbelow(10**12)),
    "underscores": lambda: f"__job_{secrets.token_hex(4)}__",
    "128 characters": lambda: secrets.token_hex(64),
}
# The broker stores these, so the client must get an answer.
ANSWERED = {
    "slash": "job-2024/17",
    "unicode": "bestellung-\u00fc",
    "Chinese": "\u6ce8\u6587-1",
    "equals sign": "a=b",
    "colon": "urn:uuid:17",
    "129 characters": "a" * 129,
    "256 characters": "a" * 256,
    "mail": "17@mail",
    "own name": "17@one",
    "reserved prefix": "item_17",
}
# Each dot begins another token of the subject, for which no tenant has the right.
REFUSED = {"dot": "job.2024", "version": "v1.2.3", "mark": "@two.demo"}


@pytest.fixture(scope="module")
def keys(cluster: Cluster) -> dict[str, Path]:
    """The files of keys that `pagemill keys add-tenant` writes."""
    options = ("--config", str(cluster.config), "--dir", str(cluster.keys))
    files = {}
    for name in QUESTIONS:
        done = preloaded.run("keys", "add-tenant", name, *options, cwd=cluster.config.parent)
        files[name] = Path(done.stdout.strip())
    return files


@pytest.fixture
async def clients(cluster: Cluster, keys: dict[str, Path]) -> AsyncIterator[dict[str, PlainClient]]:
    for file in keys.values():
        await (await sign_in(cluster, file)).close()
    clients = {name: await PlainClient.connect(cluster.url, file) for name, file in keys.items()}
    yield clients
    for client in clients.values():
        await client.close()


async def texts_of(clients: dict[str, PlainClient], request_id: str) -> list[str]:
    """Ask both tenants' questions under one id at one time, and return the texts."""
    answers = await asyncio.gather(
        *(clients[name].ask(request_id, body_of(QUESTIONS[name])) for name in QUESTIONS)
    )
    assert [fault for answer in answers for fault in answer.faults()] == []
    assert [answer.error for answer in answers] == [{}, {}]
    assert all(answer.live for answer in answers)
    return [answer.text for answer in answers]


async def test_tenants_share_ids_of_any_system(clients: dict[str, PlainClient]) -> None:
    expected = await texts_of(clients, secrets.token_hex(8))
    assert expected[0] != expected[1]
    for form, make in VALID.items():
        assert await texts_of(clients, make()) == expected, form


@pytest.mark.parametrize("request_id", ANSWERED.values(), ids=ANSWERED.keys())
async def test_an_invalid_id_that_is_stored_is_answered(
    clients: dict[str, PlainClient], request_id: str
) -> None:
    live = await clients["one"].nc.subscribe(f"pm.tokens.{request_id}")
    other = await clients["two"].nc.subscribe("pm.tokens.>")
    await clients["two"].nc.flush()

    async def is_stored() -> bool:
        # The broker refuses a second request until the first one has left its queue.
        reply = await clients["one"].call(f"pm.request.demo.{request_id}", body_of("hi"))
        return "error" not in reply

    for _ in range(2):  # A client that got no answer publishes again.
        await until(is_stored)
        record = json.loads((await live.next_msg(60)).data)
        assert (record["type"], record["error"]["field"]) == ("error", "request_id")
    await clients["two"].nc.flush()
    assert not other.pending_msgs


@pytest.mark.parametrize("request_id", REFUSED.values(), ids=REFUSED.keys())
async def test_an_id_of_several_tokens_is_refused_at_its_publish(
    clients: dict[str, PlainClient], request_id: str
) -> None:
    client = clients["one"]
    await client.nc.publish(f"pm.request.demo.{request_id}", body_of("hi"))
    await until(lambda: client.errors)
    assert "permissions violation for publish" in client.errors[0].lower()


@needs_npm
async def test_the_official_node_client_gets_the_same(
    cluster: Cluster, clients: dict[str, PlainClient], keys: dict[str, Path], tmp_path: Path
) -> None:
    for file in ("package.json", "package-lock.json"):
        shutil.copy(ROOT / "ops" / "examples" / file, tmp_path)
    script = shutil.copy(Path(__file__).with_name("plain_client.mjs"), tmp_path)
    await asyncio.to_thread(install, tmp_path)
    expected = await texts_of(clients, secrets.token_hex(8))
    valid = [make() for make in VALID.values()]

    async def ask(name: str) -> list[dict[str, Any]]:
        env = {
            "NATS_URL": cluster.url,
            "NATS_NKEY": str(keys[name]),
            "BODY": body_of(QUESTIONS[name]).decode(),
            "IDS": json.dumps([*valid, *ANSWERED.values()]),
        }
        done = await asyncio.to_thread(run, "node", str(script), **env)
        assert done.returncode == 0, done.stderr
        answers: list[dict[str, Any]] = json.loads(done.stdout)
        return answers

    answers = await asyncio.gather(*(ask(name) for name in QUESTIONS))
    for text, of_tenant in zip(expected, answers, strict=True):
        assert [answer["refused"] for answer in of_tenant] == [""] * len(of_tenant)
        assert [answer["text"] for answer in of_tenant[: len(valid)]] == [text] * len(valid)
        fields = {answer["field"] for answer in of_tenant[len(valid) :]}
        assert fields == {"request_id"}


def test_the_clients_share_no_code_with_the_product() -> None:
    source = Path(ops.chaos.plain_client.__file__).read_text()
    imported = {
        (node.module if isinstance(node, ast.ImportFrom) else node.names[0].name) or ""
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Import | ast.ImportFrom)
    }
    assert not {name.partition(".")[0] for name in imported} & {"shared", "workers", "ops", "tests"}

"""A client that publishes a request, leaves, and reads the answer when it comes back."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

from nats.aio.client import Client

from shared.client import new_request_id
from tests.cluster.conftest import ROOT, Cluster, sign_in
from tests.cluster.conftest import run as run_command
from tests.npm import install, needs_npm, run
from tests.support.waiting import until

QUESTION = "What can you do?"
EXAMPLES = ROOT / "ops" / "examples"


async def publish(nc: Client, request_id: str, question: str = QUESTION) -> None:
    body = {"model": "demo", "messages": [{"role": "user", "content": question}]}
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", json.dumps(body).encode())


async def call(nc: Client, subject: str, body: dict[str, Any] | None = None) -> Any:
    data = json.dumps(body).encode() if body else b""
    return json.loads((await nc.request(subject, data, timeout=60)).data)


async def read(nc: Client, request_id: str, max_bytes: int) -> list[dict[str, Any]]:
    """Return all records of an answer that has ended, page by page."""
    records, page = [], {"next": 0, "ended": False}
    while not page["ended"]:
        query = {"from": page["next"], "max_bytes": max_bytes}
        page = await call(nc, f"pm.read.{request_id}", query)
        assert page["records"]
        records += page["records"]
    return records


def text_of(records: list[dict[str, Any]]) -> str:
    return "".join(choice["text"] for r in records for choice in r.get("choices", []))


async def test_an_answer_is_read_after_its_client_was_away(cluster: Cluster) -> None:
    watcher = await sign_in(cluster, cluster.client_key)
    request_id = new_request_id()
    live = await watcher.subscribe(f"pm.tokens.{request_id}")
    await watcher.flush()
    nc = await sign_in(cluster, cluster.client_key)
    await publish(nc, request_id)
    await nc.close()
    nc = await sign_in(cluster, cluster.client_key)
    await until(has_ended(nc, request_id))
    records = await read(nc, request_id, 2**18)
    assert await read(nc, request_id, 1) == records
    assert [record["index"] for record in records] == [*range(len(records))]
    assert records[-1]["type"] == "finish"
    assert text_of(records)
    assert records == [json.loads((await live.next_msg(60)).data) for _ in records]
    shown = run_command(cluster, "where", request_id, "--json")
    # A client of a tenant has published the id without the tenant.
    expected = json.loads(shown) | {"request_id": request_id}
    assert await call(nc, f"pm.state.{request_id}") == expected
    await nc.close()
    await watcher.close()


def has_ended(nc: Client, request_id: str) -> Any:
    async def condition() -> bool:
        state: str = (await call(nc, f"pm.state.{request_id}"))["state"]
        return state in ("finished", "failed")

    return condition


async def test_records_are_read_as_soon_as_a_request_is_published(cluster: Cluster) -> None:
    """The stored records, and then the live ones, are the whole answer."""
    nc = await sign_in(cluster, cluster.client_key)
    for _ in range(5):
        request_id = new_request_id()
        await publish(nc, request_id)
        live = await nc.subscribe(f"pm.tokens.{request_id}")
        page = await call(nc, f"pm.read.{request_id}")
        records = page["records"]
        while not records or records[-1]["type"] == "tokens":
            record = json.loads((await live.next_msg(60)).data)
            if record["index"] >= page["next"]:
                records.append(record)
        assert records == await read(nc, request_id, 2**18)
    assert (await call(nc, "pm.read.never-sent"))["error"]["code"] == "not_found"
    await nc.close()


def test_the_python_example_reads_an_answer_again(cluster: Cluster) -> None:
    env = {"NATS_URL": cluster.url, "NATS_NKEY": str(cluster.client_key)}
    done = run(sys.executable, str(EXAMPLES / "again.py"), QUESTION, **env)
    assert done.returncode == 0, done.stderr
    assert "published, and disconnected" in done.stderr
    assert len(done.stdout) > 10


@needs_npm
def test_the_node_example_reads_an_answer_again(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("again.mjs", "package.json", "package-lock.json"):
        shutil.copy(EXAMPLES / name, tmp_path)
    install(tmp_path)
    env = {"NATS_URL": cluster.url, "NATS_NKEY": str(cluster.client_key)}
    done = run("node", str(tmp_path / "again.mjs"), QUESTION, **env)
    assert done.returncode == 0, done.stderr
    assert "published, and disconnected" in done.stderr
    assert len(done.stdout) > 10

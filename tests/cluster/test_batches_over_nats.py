"""Batches of a stock NATS client with the key of a tenant."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client
from nats.js.errors import APIError
from openai import AsyncOpenAI

from shared.client import new_request_id
from tests import preloaded
from tests.cluster.conftest import CONFIG, ROOT, Cluster, run, sign_in, start_cluster, stop_cluster
from tests.support.waiting import until

CHAT = "/v1/chat/completions"
MAX_PER_SUBJECT = 10077


def line(number: int, **fields: Any) -> dict[str, Any]:
    message = {"role": "user", "content": "What can you do?"}
    body = {"model": "demo", "messages": [message], "max_tokens": 2} | fields
    return {"custom_id": f"line-{number}", "method": "POST", "url": CHAT, "body": body}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster with a gateway for the tenant of the clients' key."""
    config = f"{CONFIG}gateway: {{tenant: local}}\n"
    running = start_cluster(tmp_path_factory.mktemp("batches"), config)
    yield running
    stop_cluster(running)


@pytest.fixture
async def nc(cluster: Cluster) -> AsyncIterator[Client]:
    client = await sign_in(cluster, cluster.client_key)
    yield client
    await client.close()


async def publish(nc: Client, batch_id: str, order: Any) -> None:
    data = order if isinstance(order, bytes) else json.dumps(order).encode()
    await nc.jetstream().publish(f"pm.batch.{batch_id}", data)


async def read(nc: Client, batch_id: str, start: int = 0, max_bytes: int = 2**18) -> Any:
    query = json.dumps({"from": start, "max_bytes": max_bytes}).encode()
    return json.loads((await nc.request(f"pm.results.{batch_id}", query, timeout=60)).data)


async def records_of(nc: Client, batch_id: str, max_bytes: int = 2**18) -> list[dict[str, Any]]:
    """Return all records of a batch when it has ended, page by page."""

    async def has_ended() -> bool:
        page = await read(nc, batch_id)
        return bool(page.get("records")) and page["records"][-1]["type"] == "ended"

    await until(has_ended)
    records, page = [], {"next": 0, "ended": False}
    while not page["ended"]:
        page = await read(nc, batch_id, page["next"], max_bytes)
        records += page["records"]
    return records


def results_of(records: list[dict[str, Any]]) -> tuple[list[str], list[str]]:
    """Return the custom ids of the answers, and of the lines with errors."""
    blocks = [record for record in records if record["type"] == "results"]
    answers = (result["custom_id"] for block in blocks for result in block["output"])
    errors = (result["custom_id"] for block in blocks for result in block["errors"])
    return sorted(answers), sorted(errors)


async def test_a_batch_is_published_followed_and_read(cluster: Cluster, nc: Client) -> None:
    batch_id = new_request_id()
    live = await nc.subscribe(f"pm.batches.{batch_id}")
    await nc.flush()
    lines = [line(0), line(1), line(2, temperature=-1)]
    await publish(nc, batch_id, {"endpoint": CHAT, "lines": lines, "metadata": {"a": "b"}})
    records = await records_of(nc, batch_id)
    assert results_of(records) == (["line-0", "line-1"], ["line-2"])
    assert records[-1]["status"] == "completed"
    assert records[-1]["checkpoint"]["num_lines"] == 3
    assert [record["index"] for record in records] == [*range(len(records))]
    # Live readers get the same records, and pages of one record each have them all.
    assert [json.loads((await live.next_msg(60)).data) for _ in records] == records
    assert await records_of(nc, batch_id, max_bytes=1) == records

    # The batch is the same over HTTP and for commands.
    url = f"{cluster.http_url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none") as client:
        batch = await client.batches.retrieve(batch_id)
        assert (batch.status, batch.metadata) == ("completed", {"a": "b"})
        assert batch.output_file_id is not None
        content = await client.files.content(batch.output_file_id)
        assert len(content.text.splitlines()) == 2
    shown = json.loads(run(cluster, "batch", "show", batch_id, "--json", "--tenant", "local"))
    assert (shown["status"], shown["answers"], shown["errors"]) == ("completed", 2, 1)

    # The same order again computes nothing.
    await publish(nc, batch_id, {"endpoint": CHAT, "lines": lines})
    assert await records_of(nc, batch_id) == records


async def test_a_file_of_http_is_run_over_nats(cluster: Cluster, nc: Client) -> None:
    content = (json.dumps(line(7)) + "\n").encode()
    async with AsyncOpenAI(base_url=f"{cluster.http_url}/v1", api_key="none") as client:
        file = await client.files.create(file=("a.jsonl", content), purpose="batch")
    batch_id = new_request_id()
    await publish(nc, batch_id, {"endpoint": CHAT, "input_file_id": file.id})
    assert results_of(await records_of(nc, batch_id)) == (["line-7"], [])


@pytest.mark.parametrize(
    ("order", "code", "param"),
    [
        (b"no JSON", "invalid_request", None),
        ({"lines": []}, "invalid_request", "endpoint"),
        ({"endpoint": CHAT}, "invalid_request", "input_file_id"),
        ({"endpoint": CHAT, "input_file_id": "file-0"}, "not_found", "input_file_id"),
        ({"endpoint": "/v1/x", "lines": [line(0)]}, "invalid_request", "endpoint"),
        (
            {"endpoint": CHAT, "lines": [line(0)], "completion_window": "9y"},
            "invalid_request",
            "completion_window",
        ),
        ({"endpoint": CHAT, "lines": []}, "empty_file", None),
        ({"endpoint": CHAT, "lines": [line(0), line(0)]}, "duplicate_custom_id", "custom_id"),
    ],
)
async def test_a_refused_order_has_its_error_in_the_log(
    nc: Client, order: Any, code: str, param: str | None
) -> None:
    batch_id = new_request_id()
    await publish(nc, batch_id, order)
    end = (await records_of(nc, batch_id))[-1]
    assert (end["type"], end["status"]) == ("ended", "failed")
    [error] = end["errors"]
    assert (error["code"], error["param"]) == (code, param)


async def test_a_batch_is_cancelled_before_and_after_its_order(nc: Client) -> None:
    js = nc.jetstream()
    for is_early in (True, False):
        batch_id = new_request_id()
        order = {"endpoint": CHAT, "lines": [line(n, max_tokens=64) for n in range(400)]}
        if is_early:
            await js.publish(f"pm.batch.{batch_id}.cancel", b"")
        await publish(nc, batch_id, order)
        if not is_early:
            await js.publish(f"pm.batch.{batch_id}.cancel", b"")
        records = await records_of(nc, batch_id)
        assert records[-1]["status"] == "cancelled"
        answers, errors = results_of(records)
        assert len(answers) + len(errors) == 400
        assert len(errors) > 300


async def test_other_tenants_have_other_batches(cluster: Cluster, nc: Client) -> None:
    options = ("--config", str(cluster.config), "--dir", str(cluster.keys))
    add = ("keys", "add-tenant", "other", *options)
    done = await asyncio.to_thread(preloaded.run, *add, cwd=cluster.config.parent)
    assert done.returncode == 0
    other = await sign_in(cluster, cluster.keys / "tenants" / "other.nk")
    batch_id = new_request_id()
    live = await other.subscribe("pm.batches.*")
    await other.flush()
    await publish(nc, batch_id, {"endpoint": CHAT, "lines": [line(1)]})
    records = await records_of(nc, batch_id)
    assert (await read(other, batch_id))["error"]["code"] == "not_found"
    # The other tenant uses the same id for another batch.
    await publish(other, batch_id, {"endpoint": CHAT, "lines": [line(2)]})
    others_records = await records_of(other, batch_id)
    assert results_of(others_records) == (["line-2"], [])
    assert [json.loads((await live.next_msg(60)).data) for _ in others_records] == others_records
    assert await records_of(nc, batch_id) == records
    await other.close()


async def test_an_invalid_id_is_refused(cluster: Cluster, nc: Client) -> None:
    await publish(nc, "x" * 65, {"endpoint": CHAT, "lines": [line(1)]})

    async def is_dead() -> bool:
        listed = await asyncio.to_thread(run, cluster, "dead", "list", "--json")
        return any(json.loads(letter)["role"] == "coordinator" for letter in listed.splitlines())

    await until(is_dead)
    assert (await read(nc, "x" * 65))["error"]["code"] == "not_found"


async def test_the_example_runs(cluster: Cluster, nc: Client, tmp_path: Path) -> None:
    env = os.environ | {"NATS_URL": cluster.url, "NATS_NKEY": str(cluster.client_key)}
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        str(ROOT / "ops" / "examples" / "batch.py"),
        "Who are you?",
        "Hello",
        env=env,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    assert err.decode().strip() == "completed"
    assert {json.loads(result)["custom_id"] for result in out.splitlines()} == {"line-0", "line-1"}


async def test_an_order_in_the_queue_is_not_published_twice(nc: Client) -> None:
    """The queue holds an order once. A client that publishes it again reads the log."""
    batch_id, js = new_request_id(), nc.jetstream()
    data = json.dumps({"endpoint": CHAT, "lines": [line(0)]}).encode()
    publishes = (js.publish(f"pm.batch.{batch_id}", data) for _ in range(50))
    outcomes = await asyncio.gather(*publishes, return_exceptions=True)
    refusals = [outcome for outcome in outcomes if isinstance(outcome, BaseException)]
    assert {getattr(error, "err_code", None) for error in refusals} <= {MAX_PER_SUBJECT}
    assert all(isinstance(error, APIError) for error in refusals)
    assert results_of(await records_of(nc, batch_id)) == (["line-0"], [])


async def test_requests_and_lines_of_a_batch_have_separate_ids(nc: Client) -> None:
    batch_id = new_request_id()
    body = {"model": "demo", "messages": [{"role": "user", "content": "What can you do?"}]}
    first, later = f"{batch_id}-0-0", f"{batch_id}-1-0"
    await request(nc, first, {**body, "sampling_params": {"max_tokens": 3}})
    await publish(nc, batch_id, {"endpoint": CHAT, "lines": [line(0), line(1)]})
    records = await records_of(nc, batch_id)
    results = [result for record in records for result in record.get("output", [])]
    bodies = [result["response"]["body"] for result in results]
    assert [answer["usage"]["completion_tokens"] for answer in bodies] == [2, 2]
    await request(nc, later, {**body, "sampling_params": {"max_tokens": 3}})
    for request_id in (first, later):
        page = json.loads((await nc.request(f"pm.read.{request_id}", timeout=60)).data)
        assert page["records"][-1]["usage"]["completion_tokens"] == 3
    for result in results:
        page = json.loads((await nc.request(f"pm.read.{result['response']['request_id']}")).data)
        assert page["ended"]


async def request(nc: Client, request_id: str, body: dict[str, Any]) -> None:
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    await nc.jetstream().publish(f"pm.request.demo.{request_id}", json.dumps(body).encode())
    while json.loads((await log.next_msg(60)).data)["type"] == "tokens":
        pass

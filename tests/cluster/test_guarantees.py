"""The guarantees of every accepted request during faults, with real processes."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from functools import partial

import msgspec
import pytest

from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.client import ask, cancel, follow, new_request_id
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.requests import GenerateRequest
from shared.state import request_status
from tests import preloaded
from tests.cluster.conftest import (
    FORKED_PAGEMILL,
    Cluster,
    answer,
    living,
    name_of_process,
    request_text,
    stopped,
)
from tests.cluster.streams import assert_gapless, attempts_of, tokens_of
from tests.support.waiting import until

LONG = {"ignore_eos": True, "max_tokens": 900, "temperature": 0.0}


async def engine_is_idle(bus: Bus) -> bool:
    return all(
        beat.load["held"] == 0 and beat.load["free_blocks"] == beat.load["blocks"]
        for beat in await living(bus, "engine")
    )


async def work_of(bus: Bus, request_id: str) -> bool:
    return await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id)) is not None


def code_of(records: list[LogRecord]) -> str:
    final = records[-1]
    assert isinstance(final, Failure)
    return final.error.code


@contextlib.asynccontextmanager
async def second_engine(cluster: Cluster, bus: Bus) -> AsyncIterator[preloaded.ForkedCommand]:
    workers = {beat.worker for beat in await living(bus, "engine")}
    command = ["worker", "engine", "--config", str(cluster.config), "--nats", cluster.url]
    with cluster.log.open("ab") as log:
        process = preloaded.start(command, stderr=log)

    async def ready() -> bool:
        return any(beat.worker not in workers for beat in await living(bus, "engine"))

    try:
        await until(ready, 60, "the second engine is not ready")
        yield process
    finally:
        process.terminate()
        process.wait(30)


async def test_cancelled_mid_answer(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    records: list[LogRecord] = []
    began = 0.0
    async for record in ask(client, request_text("What can you do?", **LONG), request_id):
        records.append(record)
        if len(records) == 5:
            began = time.monotonic()
            await cancel(client, request_id)
    assert time.monotonic() - began < 10
    assert_gapless(records)
    assert code_of(records) == "cancelled"
    assert len(tokens_of(records)) < 900
    await until(lambda: gone(client, request_id), 20, "the work is still queued")
    await until(lambda: engine_is_idle(client), 20, "the engine still holds something")


async def test_cancelled_while_it_waits_for_an_engine(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    with stopped(await cluster.pid(client, "engine")):
        running = asyncio.create_task(collect(client, request_text("Hello", **LONG), request_id))
        await until(lambda: work_of(client, request_id), 20, "no stage has it")
        await asyncio.sleep(0.3)
        await cancel(client, request_id)
        records = await asyncio.wait_for(running, 20)
    assert [code_of(records)] == ["cancelled"]
    # The engine finds it, and that it is over.
    await until(lambda: gone(client, request_id), 20, "the work is still queued")


async def gone(bus: Bus, request_id: str) -> bool:
    return not await work_of(bus, request_id)


async def collect(bus: Bus, request: GenerateRequest, request_id: str) -> list[LogRecord]:
    return [record async for record in ask(bus, request, request_id)]


async def test_cancelled_before_it_was_asked(client: Bus) -> None:
    request_id = new_request_id()
    await cancel(client, request_id)
    records = await asyncio.wait_for(collect(client, request_text("Hello"), request_id), 20)
    assert code_of(records) == "cancelled"


async def test_a_deadline_is_kept_with_no_engine_to_keep_it(cluster: Cluster, client: Bus) -> None:
    request = msgspec.structs.replace(request_text("Hello"), timeout_s=1.5)
    began = time.monotonic()
    with stopped(await cluster.pid(client, "engine")):
        records = await collect(client, request, new_request_id())
    assert 1.4 < time.monotonic() - began < 10
    assert code_of(records) == "deadline_exceeded"
    final = records[-1]
    assert isinstance(final, Failure)
    assert final.error.retryable


async def test_a_deadline_ends_an_answer_that_takes_too_long(client: Bus) -> None:
    request = msgspec.structs.replace(request_text("What can you do?", n=4, **LONG), timeout_s=0.5)
    request_id = new_request_id()
    records = await collect(client, request, request_id)
    assert_gapless(records)
    assert code_of(records) == "deadline_exceeded"
    await until(lambda: engine_is_idle(client), 20, "the engine still holds something")
    # Whoever still wrote was refused: the log ends where the reader saw it end.
    assert await read_log(client, request_id) == records


async def test_too_long_a_deadline_is_refused_by_name(client: Bus) -> None:
    request = msgspec.structs.replace(request_text("Hello"), timeout_s=1e6)
    (record,) = await answer(client, request)
    assert isinstance(record, Failure)
    assert (record.error.code, record.error.field) == ("invalid_request", "timeout_s")
    assert "3000" in record.error.message


async def test_the_same_id_again_is_the_same_request(client: Bus) -> None:
    request = request_text("What can you do?", temperature=1.0)
    request_id = new_request_id()
    first = await collect(client, request, request_id)
    again = await collect(client, request, request_id)
    assert again == first
    await client.publish_without_id(subjects.request("demo", request_id), to_json(request))
    await asyncio.sleep(1)
    assert await read_log(client, request_id) == first
    assert not await work_of(client, request_id)


async def test_a_log_is_replayed_from_any_index(client: Bus) -> None:
    request_id = new_request_id()
    request = request_text("What can you do?", **LONG)
    records = await collect(client, request, request_id)
    assert len(records) > 3
    for start in (0, 3, len(records) - 1):
        assert [r async for r in follow(client, request_id, start)] == records[start:]


async def test_a_zombie_is_fenced_off_and_lets_go(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    request = request_text("What can you do?", n=4, **LONG)
    undisturbed = await answer(client, request)
    async with second_engine(cluster, client):
        records: list[LogRecord] = []
        zombie: Heartbeat | None = None
        async for record in ask(client, request, request_id):
            records.append(record)
            if len(records) == 5:
                status = await request_status.find(client, request_id)
                (zombie,) = [b for b in await living(client, "engine") if b.worker == status.worker]
                os.kill(zombie.pid, signal.SIGSTOP)
        assert zombie is not None
        os.kill(zombie.pid, signal.SIGCONT)
        await until(lambda: engine_is_idle(client), 30, "the zombie still holds the request")
    assert_gapless(records)
    assert isinstance(records[-1], Finish)
    assert len(attempts_of(records)) == 2
    assert tokens_of(records) == tokens_of(undisturbed)
    assert await read_log(client, request_id) == records


async def test_a_second_signal_hands_back_at_once(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    records: list[LogRecord] = []
    async with second_engine(cluster, client) as second:
        with stopped(await other_engine(client, second.pid)):
            running = ask(client, request_text("What can you do?", n=4, **LONG), request_id)
            async for record in running:
                records.append(record)
                if len(records) == 5:
                    second.send_signal(signal.SIGTERM)
                if len(records) == 8:
                    began = time.monotonic()
                    second.send_signal(signal.SIGTERM)
                    break
            assert await asyncio.to_thread(second.wait, 10) == 0
            assert time.monotonic() - began < 6  # of the ten that the drain may take
        records += [record async for record in running]
    assert_gapless(records)
    assert isinstance(records[-1], Finish)
    # The stopped engine may have been given it in between, and not have heard of it.
    first, handed_back = attempts_of(records)
    assert handed_back > first


async def other_engine(bus: Bus, pid: int) -> int:
    (other,) = {beat.pid for beat in await living(bus, "engine")} - {pid}
    return other


async def test_ctrl_c_cancels(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    command = [*FORKED_PAGEMILL, "ask", "What can you do?", "--request-id", request_id]
    options = ["--nats", cluster.url, "--config", str(cluster.config)]
    with stopped(await cluster.pid(client, "engine")):
        process = await asyncio.create_subprocess_exec(
            *command, *options, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        await until(partial(in_engine, client, request_id), 20, "it does not come to the engine")
        process.send_signal(signal.SIGINT)
        _, stderr = await asyncio.wait_for(process.communicate(), 10)
        # An engine that continues may end the request before a coordinator does.
        records = [record async for record in follow(client, request_id)]
    assert process.returncode == 130
    assert stderr.decode().split() == ["request", request_id, "cancelled"]
    assert code_of(records) == "cancelled"


async def in_engine(client: Bus, request_id: str) -> bool:
    return (await request_status.find(client, request_id)).stage == "engine"


async def test_where_is_my_request(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    assert run(cluster, "where", request_id).returncode == 1
    with stopped(await cluster.pid(client, "engine")):
        running = asyncio.create_task(collect(client, request_text("Hello"), request_id))
        await until(partial(in_engine, client, request_id), 20, "it does not come to the engine")
        status = await request_status.find(client, request_id)
        assert [hop.stage for hop in status.path] == ["coordinator", "renderer"]
    await running
    request_id = new_request_id()
    with stopped(await cluster.pid(client, "renderer")):
        running = asyncio.create_task(collect(client, request_text("Hello"), request_id))
        await until(lambda: work_of(client, request_id), 20, "no stage has it")
        status = await request_status.find(client, request_id)
        assert (status.state, status.stage) == ("queued", "renderer")
        assert [hop.stage for hop in status.path] == ["coordinator"]
        assert status.waits_s is not None
        assert status.why
    await running
    status = await request_status.find(client, request_id)
    assert (status.state, status.stage, status.attempt is not None) == ("finished", "engine", True)
    assert [hop.stage for hop in status.path] == ["coordinator", "renderer", "engine"]
    done = run(cluster, "where", request_id)
    assert done.returncode == 0
    assert "finished" in done.stdout


async def test_dead_letters_from_the_command_line(cluster: Cluster, client: Bus) -> None:
    request_id = new_request_id()
    subject = subjects.stage("renderer", "demo", "interactive", request_id)
    await client.publish(subject, b"\xc1garbage", request_id)
    records = [record async for record in follow(client, request_id)]
    assert code_of(records) == "undecodable_message"
    listed = run(cluster, "dead", "list", "--json").stdout.splitlines()
    (key,) = [row["key"] for row in map(json.loads, listed) if row["name"] == request_id]
    assert f"{key} " in run(cluster, "dead", "list").stdout
    letter = run(cluster, "dead", "show", request_id)
    assert "undecodable_message: 8 bytes are too few for an envelope" in letter.stdout
    refused = run(cluster, "dead", "requeue", key)
    assert refused.returncode == 1
    assert "does not contain a request" in refused.stderr
    assert run(cluster, "dead", "drop", key).returncode == 0
    assert "there is no dead letter" in run(cluster, "dead", "show", key).stderr
    assert run(cluster, "dead", "show", request_id).returncode == 1


def run(cluster: Cluster, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"COLUMNS": "200"}
    return preloaded.run(*arguments, "--nats", cluster.url, env=env)


@pytest.mark.parametrize("role", ["coordinator", "renderer", "engine"])
async def test_every_role_is_restarted_under_load_and_nothing_fails(
    cluster: Cluster, client: Bus, role: str
) -> None:
    request = request_text("What can you do?", temperature=0.0)
    running = [asyncio.create_task(answer(client, request)) for _ in range(12)]
    await asyncio.sleep(0.2)
    (old,) = await living(client, role)
    os.kill(old.pid, signal.SIGTERM)
    for records in await asyncio.gather(*running):
        assert_gapless(records)
        assert isinstance(records[-1], Finish)

    async def replaced() -> bool:
        return any(beat.worker != old.worker for beat in await living(client, role))

    await until(replaced, 30, f"no new {role}")


async def test_processes_are_named_after_their_workers(cluster: Cluster, client: Bus) -> None:
    for role in ("coordinator", "renderer", "engine", "gateway"):
        (beat,) = await living(client, role)
        assert name_of_process(beat.pid) == beat.worker[:15]

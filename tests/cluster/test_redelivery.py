"""Workers are killed while they process a request; the client still sees one gapless stream."""

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import nats
import pytest
from nats.js.api import ConsumerInfo

from ops.demo import IMAGES
from ops.token_logs import read_log
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.client import new_request_id
from shared.protocol import subjects
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest, ImagePart, ImageURL, Message, TextPart
from shared.state import request_registry, request_status
from tests import preloaded
from tests.cluster.conftest import (
    IMAGE_HOST,
    Cluster,
    answer,
    kill,
    parent_of,
    request_text,
    start_cluster,
    stop_cluster,
    stopped,
)
from tests.cluster.streams import assert_gapless, attempts_of, read_amid_signal, text_of, tokens_of
from tests.renderer.canary import Canary, send
from workers.cli.ask import build_request
from workers.gateway.core.ids import part_ids
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.openai.embeddings import EMBEDDING
from workers.gateway.openai.scores import SCORE

KINDS: dict[str, AnswerKind[Any]] = {"embedding": EMBEDDING, "score": SCORE}

LONG = {"ignore_eos": True, "max_tokens": 900}


def texts_of(kind: str, round_: int) -> dict[str, Any]:
    """Return the body of a batch. No text begins with another text, because it would be cached."""
    texts = [f"{round_}.{number} texts: " + "What can you do? " * 40 for number in range(60)]
    if kind == "embedding":
        return {"model": "demo", "input": texts}
    return {"model": "demo", "text_1": texts[0], "text_2": texts[1:]}


@pytest.mark.parametrize(
    "request_",
    [
        pytest.param(
            request_text("What can you do?", temperature=0.0, **LONG),
            id="greedy",
            marks=pytest.mark.long,
        ),
        pytest.param(
            request_text("What can you do?", temperature=1.0, seed=11, n=2, **LONG),
            id="seeded, two choices",
            marks=pytest.mark.long,
        ),
        pytest.param(
            request_text("What can you do?", temperature=0.9, top_k=40, **LONG),
            id="sampled without a seed",
        ),
    ],
)
async def test_an_engine_killed_mid_answer(
    cluster: Cluster, client: Bus, request_: GenerateRequest
) -> None:
    choices = range(request_.sampling_params.n)  # type: ignore[union-attr]
    request_id = new_request_id()
    engine = await cluster.pid(client, "engine")
    records = await read_amid_signal(client, request_, engine, after=5, request_id=request_id)
    # Deliveries are put off until the heartbeat of the killed engine is overdue, and each has a
    # number. So the second number is greater than the first by one or more.
    first, second = attempts_of(records)
    assert [record.attempt for record in records].index(second) >= 5
    assert {record.attempt for record in records[:5]} == {first}
    assert all(len(tokens_of(records, choice)) == 900 for choice in choices)
    assert records == await read_log(client, request_id)
    if request_.sampling_params.seed is not None or not request_.sampling_params.temperature:  # type: ignore[union-attr]
        undisturbed = await answer(client, request_)
        assert attempts_of(undisturbed) == [1]
        for choice in choices:
            assert tokens_of(records, choice) == tokens_of(undisturbed, choice)
            assert text_of(records, choice) == text_of(undisturbed, choice)


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.long), 1.0])
async def test_an_engine_killed_amid_an_answer_that_is_held_to_a_grammar(
    cluster: Cluster, client: Bus, temperature: float
) -> None:
    words = "([a-z]{4,6} ){150}end"
    request = request_text(
        "What can you do?",
        temperature=temperature,
        seed=11,
        n=4,
        max_tokens=900,
        structured_outputs={"regex": words},
    )
    # On a busy machine the engine may have written the whole answer before the client reads it.
    for _ in range(5):
        engine = await cluster.pid(client, "engine")
        records = await read_amid_signal(client, request, engine)
        if len(attempts_of(records)) == 2:
            break
    assert len(attempts_of(records)) == 2
    undisturbed = await answer(client, request)
    for choice in range(4):
        assert re.fullmatch(words, text_of(records, choice))
        assert tokens_of(records, choice) == tokens_of(undisturbed, choice)


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/v1/embeddings", "embedding"),
        pytest.param("/v1/score", "score", marks=pytest.mark.long),
    ],
)
async def test_an_engine_killed_amid_embeddings(
    cluster: Cluster, client: Bus, path: str, kind: str
) -> None:
    url = next(beat.url for beat in await client.heartbeats.read() if beat.url is not None)
    async with httpx.AsyncClient(base_url=url, timeout=120, trust_env=False) as http:
        # An engine may be done with a whole batch before it is killed.
        for round_ in range(5):
            body, name = texts_of(kind, round_), new_request_id()
            engine = await cluster.pid(client, "engine")
            running = asyncio.create_task(
                http.post(path, json=body, headers={"x-request-id": name})
            )
            parts = await _embedding_parts(client, name, running)
            os.kill(engine, signal.SIGSTOP)
            claimed = [part for part in parts if await _is_in_engine(client, part)]
            os.kill(engine, signal.SIGKILL)
            embedded = await running
            if claimed:
                break
        undisturbed = await http.post(path, json=body)
    assert (embedded.status_code, embedded.json()["usage"]) == (200, undisturbed.json()["usage"])
    for entry, other in zip(embedded.json()["data"], undisturbed.json()["data"], strict=True):
        field = "embedding" if kind == "embedding" else "score"
        assert entry[field] == pytest.approx(other[field], abs=1e-5)
    logs = {part: await read_log(client, part) for part in parts}
    for records in logs.values():
        assert_gapless(records)
        (chunk, final) = records
        assert isinstance(chunk, TokenChunk)
        assert chunk.embedding is not None
        assert isinstance(final, Finish)
    # Records that the engine had sent before it was stopped may have arrived later.
    assert any(attempts_of(logs[part]) > [1] for part in claimed)


async def _embedding_parts(
    bus: Bus, request_id: str, running: asyncio.Task[httpx.Response]
) -> list[str]:
    """Return the ids of a batch's parts when an engine has claimed one, or the batch is done."""
    while True:
        is_done = running.done()
        record = await request_registry.find(bus, request_id)
        parts = [] if record is None else part_ids(request_id, record)
        if is_done:
            return parts
        for part in parts:
            if await _is_in_engine(bus, part):
                return parts


async def _is_in_engine(bus: Bus, part: str) -> bool:
    status = await request_status.find(bus, part)
    return (status.state, status.stage) == ("running", "engine")


async def test_a_grammar_that_kills_its_compiler_harms_no_other_request(
    cluster: Cluster, client: Bus
) -> None:
    rules = "\n".join(f'r{i}: "a" r{i + 1} | "b"' for i in range(4500))
    request = request_text(
        "Hello", structured_outputs={"grammar": f'start: r0\n{rules}\nr4500: "z"'}
    )
    engine = await cluster.pid(client, "engine")
    neighbour = asyncio.create_task(answer(client, request_text("What can you do?", **LONG)))
    (record,) = await answer(client, request)
    assert isinstance(record, Failure)
    assert record.error.code == "invalid_grammar"
    assert record.error.field == "sampling_params.structured_outputs"
    assert isinstance((await neighbour)[-1], Finish)
    assert await cluster.pid(client, "engine") == engine


async def test_a_renderer_killed_while_it_processes_a_request(
    cluster: Cluster, client: Bus
) -> None:
    renderer = await cluster.pid(client, "renderer")
    request = build_request("demo", "What color is this image?", [IMAGES / "red.png"], {})
    while True:
        await wait_until_idle(cluster.url, "renderer")
        # Stopped first, so that it has not passed the request on.
        os.kill(renderer, signal.SIGSTOP)
        running = asyncio.create_task(answer(client, request))
        if await wait_until_queued(cluster.url, "renderer"):
            break
        os.kill(renderer, signal.SIGCONT)
        await running
    os.kill(renderer, signal.SIGKILL)
    records = await running
    assert_gapless(records)
    final = records[-1]
    assert isinstance(final, Finish)
    assert "red" in text_of(records).lower()
    assert [(hop.stage, hop.attempt) for hop in final.path] == [
        ("coordinator", 1),
        ("renderer", 2),
        ("engine", 1),
    ]


async def test_a_renderer_killed_with_an_unread_payload(cluster: Cluster, client: Bus) -> None:
    renderer, engine = [await cluster.pid(client, role) for role in ("renderer", "engine")]
    await wait_until_idle(cluster.url, "engine")
    request = build_request("demo", "What color is this image?", [IMAGES / "red.png"], {})
    with stopped(engine):
        running = asyncio.create_task(answer(client, request))
        await wait_until_queued(cluster.url, "engine", running)
        kill(renderer)
    records = await running
    assert_gapless(records)
    final = records[-1]
    assert isinstance(final, Finish)
    assert "red" in text_of(records).lower()
    roles = [hop.stage for hop in final.path]
    assert roles == ["coordinator", "renderer", "engine", "renderer", "engine"]


async def test_an_image_whose_url_has_changed_when_its_payload_is_lost(
    cluster: Cluster, client: Bus
) -> None:
    canary = Canary(IMAGE_HOST)
    canary.answers["/a.png"] = send((IMAGES / "red.png").read_bytes())
    message = Message(
        "user",
        [ImagePart(ImageURL(canary.url(host=IMAGE_HOST))), TextPart("What color is this image?")],
    )
    renderer, engine = [await cluster.pid(client, role) for role in ("renderer", "engine")]
    await wait_until_idle(cluster.url, "engine")
    with stopped(engine):
        running = asyncio.create_task(answer(client, GenerateRequest("demo", [message])))
        await wait_until_queued(cluster.url, "engine", running)
        canary.answers["/a.png"] = send((IMAGES / "blue.png").read_bytes())
        kill(renderer)
    records = await running
    canary.close()
    final = records[-1]
    assert isinstance(final, Finish)
    assert [hop.stage for hop in final.path].count("renderer") == 2
    assert "red" in text_of(records).lower()
    assert len(canary.paths) == 1


async def test_the_broker_killed_mid_answer(cluster: Cluster, client: Bus) -> None:
    request = request_text("What can you do?", temperature=0.0, **LONG)
    broker = int((cluster.config.parent / "data" / "nats" / "nats-server.pid").read_text())
    request_id = new_request_id()
    records = await read_amid_signal(client, request, broker, after=5, request_id=request_id)
    assert records == await read_log(client, request_id)
    assert tokens_of(records) == tokens_of(await answer(client, request))


async def test_sigterm_drains_and_loses_nothing(tmp_path: Path) -> None:
    cluster = start_cluster(tmp_path)
    bus = await Bus.connect(cluster.url, "test")
    request = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=300)
    records = await read_amid_signal(bus, request, cluster.process.pid, signal.SIGTERM)
    assert attempts_of(records) == [1]
    await bus.close()
    assert stop_cluster(cluster) == 0


async def wait_until_queued(
    url: str, role: str, running: asyncio.Task[list[LogRecord]] | None = None
) -> bool:
    """Wait until a stopped worker's queue has a request; return whether the worker has claimed it.

    A worker whose last pull ends while it is stopped claims nothing. The test fails at once if the
    request `running` ends before.
    """

    def is_queued(lanes: list[ConsumerInfo]) -> bool:
        if running is not None and running.done():
            pytest.fail(f"the request has ended before it was queued: {running.result()}")
        return has_claimed(lanes) or any(lane.num_pending for lane in lanes)

    return has_claimed(await _wait_for(url, role, is_queued))


def has_claimed(lanes: list[ConsumerInfo]) -> bool:
    return any(lane.num_ack_pending for lane in lanes)


async def wait_until_idle(url: str, role: str) -> None:
    """Wait until the role's workers have acknowledged what they were given before.

    A stage acknowledges a request after its client has read the end.
    """
    await _wait_for(url, role, lambda lanes: not has_claimed(lanes))


async def _wait_for(
    url: str, role: str, condition: Callable[[list[ConsumerInfo]], bool]
) -> list[ConsumerInfo]:
    """Wait for a state of the role's queues, one for each lane.

    Tests that share the cluster may have sent requests of other tenants, or many at once. A request
    may then come to the batch lane.
    """
    nc = await nats.connect(url, nkeys_seed=str(Login.of_operator(url).seed_file))
    js, deadline = nc.jetstream(), time.monotonic() + 60
    consumers = [subjects.stage_consumer(role, "demo", lane) for lane in subjects.LANES]
    try:
        while time.monotonic() < deadline:
            lanes = [await js.consumer_info(subjects.STAGES_STREAM, name) for name in consumers]
            if condition(lanes):
                return lanes
            await asyncio.sleep(0.02)
        pytest.fail(f"the queues of the {role} stayed the same: {lanes}")
    finally:
        await nc.close()


async def test_a_killed_preloader_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The workers that it forked drain, and separate processes replace them."""
    # Their imports would take more processor time than any other test.
    preloaded.write_python(tmp_path / "python")
    monkeypatch.setenv(preloaded.PYTHON_OF, str(tmp_path / "python"))
    cluster = start_cluster(tmp_path)
    bus = await Bus.connect(cluster.url, "test")
    first = await cluster.pid(bus, "engine")
    preloader = parent_of(first)
    assert preloader not in (None, cluster.process.pid)
    request = request_text("What can you do?", temperature=0.0, ignore_eos=True, max_tokens=300)
    records = await read_amid_signal(bus, request, preloader)
    assert tokens_of(records) == tokens_of(await answer(bus, request))
    second = await cluster.pid(bus, "engine")
    assert second != first
    os.kill(second, signal.SIGKILL)
    assert tokens_of(records) == tokens_of(await answer(bus, request))
    await bus.close()
    assert stop_cluster(cluster) == 0

"""Commands about requests and models that exist or do not, at a real broker."""

import asyncio
import json
import os
import secrets
import subprocess
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
from nats.aio.client import Client as NatsClient

from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.errors import Cancelled, WorkerFailure
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import MessageItem
from shared.protocol.messages import AttemptRecord, Heartbeat, RequestRecord
from shared.protocol.records import OutputSummary, StageSpan, Usage
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.steps import Begun, Ended
from shared.state import request_registry
from shared.state.step_log import StepLog
from shared.state.token_log import LogWriter, end_request
from tests import preloaded
from tests.cluster.conftest import FORKED_PAGEMILL, ROOT


async def run(broker: EmbeddedServer, *arguments: str) -> tuple[int, str, str]:
    """Run a command; return its exit code, its output and its errors."""
    env = os.environ | {"COLUMNS": "400"}
    command = partial(preloaded.run, *arguments, "--nats", broker.url, env=env)
    done = await asyncio.to_thread(command)
    assert "Traceback" not in done.stderr
    return done.returncode, done.stdout, done.stderr


@pytest.fixture
def request_id() -> str:
    return f"t-{secrets.token_hex(6)}"


def start_coordinator(url: str, log: Path) -> preloaded.ForkedCommand:
    with log.open("wb") as stderr:
        return preloaded.start(["worker", "coordinator", "--nats", url], stderr=stderr)


@pytest.fixture
async def coordinator(broker: EmbeddedServer, bus: Bus, tmp_path: Path) -> AsyncIterator[None]:
    """A running coordinator of the embedded default configuration."""
    process = start_coordinator(broker.url, tmp_path / "coordinator.log")
    while not any(beat.pid == process.pid for beat in await bus.heartbeats.read()):
        assert process.poll() is None
        await asyncio.sleep(0.05)
    yield
    process.terminate()
    await asyncio.to_thread(process.wait)


async def publish(bus: Bus, request_id: str) -> None:
    request = GenerateRequest("demo", [Message("user", "hello")])
    await bus.publish_without_id(subjects.request("demo", request_id), to_json(request))


async def finish(bus: Bus, request_id: str) -> None:
    log = await LogWriter.open(bus, request_id, attempt=1)
    path = [StageSpan("engine", "engine-2", 2, 2.0, 3.0)]
    await log.finish(OutputSummary(usage=Usage(1, 1), path=path), {})


@pytest.mark.parametrize("role", ["engine", "encoder"])
async def test_a_worker_of_an_unknown_model_names_it_and_those_configured(
    broker: EmbeddedServer, role: str
) -> None:
    code, _, err = await run(broker, "worker", role, "--model", "nosuch")
    assert code == 78
    event = json.loads(err.splitlines()[-1])
    assert event["code"] == "invalid_configuration"
    assert event["reason"] == "no model 'nosuch' is configured; configured: demo"


async def test_a_worker_ends_in_one_way_for_all_it_refuses_of_a_configuration(
    broker: EmbeddedServer, tmp_path: Path
) -> None:
    (tmp_path / "bad.yaml").write_text("models: {mine: {path: 5}}")
    arguments = ("worker", "engine", "--config", str(tmp_path / "bad.yaml"))
    code, _, err = await run(broker, *arguments)
    assert (code, "models.mine.path" in err) == (78, True)


async def test_a_misspelt_variable_is_named(broker: EmbeddedServer, tmp_path: Path) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*FORKED_PAGEMILL, "check"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT), "PAGEMILL_ENGIN__BLOCK_SIZE": "8"},
        capture_output=True,
        text=True,
        check=False,
    )
    errors = " ".join(done.stderr.split())
    assert done.returncode == 1
    assert "PAGEMILL_ENGIN__BLOCK_SIZE: " in errors
    assert "did you mean PAGEMILL_ENGINE__BLOCK_SIZE?" in errors
    assert "embedded default" not in errors


@pytest.mark.parametrize("command", ["follow", "cancel", "where"])
async def test_a_request_that_was_never_asked_for_is_not_known(
    broker: EmbeddedServer, coordinator: None, command: str, request_id: str
) -> None:
    code, out, err = await run(broker, command, request_id)
    assert code == 1
    assert "it has never been asked for" in out + err
    if command != "where":
        assert f"not_found: no request {request_id} is known" in err


async def test_the_request_of_a_tenant_needs_no_suffix(
    broker: EmbeddedServer, coordinator: None, bus: Bus, request_id: str
) -> None:
    await publish(bus, f"{request_id}@acme")
    assert "tenant   acme" in (await run(broker, "where", request_id))[1]
    code, out, _ = await run(broker, "cancel", request_id)
    assert (code, out) == (0, f"{request_id}@acme is cancelled\n")
    code, _, err = await run(broker, "follow", request_id)
    assert (code, "cancelled" in err) == (1, True)
    await finish(bus, f"{request_id}@other")
    code, _, err = await run(broker, "where", request_id)
    assert code == 1
    assert f"name one of {request_id}@acme, {request_id}@other" in err


async def test_an_unknown_request_is_not_cancelled_for_later(
    broker: EmbeddedServer, coordinator: None, bus: Bus, request_id: str
) -> None:
    await run(broker, "cancel", request_id)
    assert await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens(request_id)) is None


async def test_follow_waits_for_the_time_of_its_option(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    following = asyncio.create_task(run(broker, "follow", request_id, "--wait", "30"))
    await asyncio.sleep(3)  # Longer than it waits by itself.
    assert not following.done()
    await finish(bus, request_id)
    assert (await following)[0] == 0


async def test_follow_waits_for_what_a_gateway_has_just_recorded(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    now_s = int(bus.now_ms() / 1000)
    record = RequestRecord("chat", "demo", "", now_s, False, timeout_s=60.0)
    await request_registry.register(bus, request_id, record, "gateway-1:1")
    following = asyncio.create_task(run(broker, "follow", request_id, "--wait", "0"))
    await asyncio.sleep(3)
    assert not following.done()
    await finish(bus, request_id)
    assert (await following)[0] == 0


async def test_follow_saves_an_image_or_says_how_to(
    broker: EmbeddedServer, bus: Bus, request_id: str, tmp_path: Path
) -> None:
    media = await client.pin_media(bus, b"png")
    output = await LogWriter.open(bus, request_id, attempt=1, output="image")
    await output.image(0, media, (8, 8), seed=5)
    await output.end(OutputSummary())
    log = await LogWriter.open(bus, request_id, attempt=1)
    await log.finish(OutputSummary(usage=Usage(1, 0), path=[]), {"image": OutputSummary()})
    code, out, err = await run(broker, "follow", request_id)
    hint = f"the answer has an image: pagemill follow {request_id} -o FILE saves it\n"
    assert (code, out, err) == (0, "", hint)
    await run(broker, "follow", request_id, "-o", str(tmp_path / "a.png"))
    assert (tmp_path / "a.png").read_bytes() == b"png"


async def test_follow_names_the_requests_of_several_prompts(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    record = RequestRecord("completion", "demo", "", 0, False, {"parts": 3})
    await request_registry.register(bus, request_id, record, "gateway-1:1")
    code, _, err = await run(broker, "follow", request_id, "--wait", "0")
    assert code == 1
    assert f"{request_id}~0 to {request_id}~2" in err


async def test_cancel_says_that_a_request_is_cancelled(
    broker: EmbeddedServer, coordinator: None, bus: Bus, request_id: str
) -> None:
    await publish(bus, request_id)
    assert (await run(broker, "cancel", request_id))[:2] == (0, f"{request_id} is cancelled\n")
    again = await run(broker, "cancel", request_id)
    assert again[:2] == (0, f"{request_id} is already cancelled\n")


async def test_cancel_says_that_a_request_has_ended_and_how(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    await finish(bus, request_id)
    code, out, _ = await run(broker, "cancel", request_id)
    assert (code, out) == (
        2,
        f"{request_id} has already finished: its log has its final record\n",
    )
    await end_request(bus, f"{request_id}-x", 1, WorkerFailure("it broke"), [])
    code, out, _ = await run(broker, "cancel", f"{request_id}-x")
    assert (code, out) == (2, f"{request_id}-x has already failed: worker_failure: it broke\n")


async def test_cancel_without_a_coordinator_is_stored(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    subject = subjects.stage("engine", "m", "batch", request_id)
    await bus.publish(subject, b"task", f"{request_id}:1:engine:0")
    code, out, _ = await run(broker, "cancel", request_id)
    assert (code, out.count("not cancelled yet")) == (0, 1)
    assert (await bus.figures.size(subjects.CANCELS_STREAM))[0] == 1
    await bus.purge(subjects.CANCELS_STREAM, subjects.cancel(request_id))
    await bus.purge(subjects.STAGES_STREAM, subject)


async def test_where_shows_a_response(broker: EmbeddedServer, bus: Bus) -> None:
    log = StepLog(bus, "alice", f"resp_{secrets.token_hex(8)}")
    await log.append(Begun(0, 1, "demo", "alice", [MessageItem("user", "Hi")], {}))
    await log.append(Ended(0, "incomplete", 2, "max_output_tokens"))
    code, out, _ = await run(broker, "where", log.response_id)
    assert code == 0
    assert [line.split()[:2] for line in out.splitlines()][:2] == [
        ["state", "incomplete"],
        ["steps", "2"],
    ]
    assert "max_output_tokens" in out


async def test_where_lists_no_delivery_of_an_ended_request_as_open(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    for worker, number in (("engine-1", 1), ("engine-2", 2)):
        attempt = AttemptRecord("engine", worker, number, float(number), 0)
        await bus.publish_without_id(subjects.attempts(request_id), to_json(attempt))
    await finish(bus, request_id)
    code, out, _ = await run(broker, "where", request_id)
    assert code == 0
    assert [line.split()[-1] for line in out.splitlines() if "delivery" in line] == [
        "superseded",
        "done",
    ]


async def test_where_lists_the_delivery_of_a_cancelled_request_as_ended(
    broker: EmbeddedServer, bus: Bus, request_id: str
) -> None:
    for outcome in ("open", "requeued"):
        attempt = AttemptRecord("engine", "engine-1", 1, 1.0, 0, outcome)
        await bus.publish_without_id(subjects.attempts(request_id), to_json(attempt))
    attempt = AttemptRecord("engine", "engine-1", 2, 2.0, 0)
    await bus.publish_without_id(subjects.attempts(request_id), to_json(attempt))
    await end_request(bus, request_id, 1, Cancelled("cancelled on request"), [])
    _, out, _ = await run(broker, "where", "--json", request_id)
    assert [a["outcome"] for a in json.loads(out)["attempts"]] == ["requeued", "ended"]


@pytest.mark.parametrize("command", ["render", "tokenize"])
async def test_a_preview_of_a_model_that_is_not_served_names_those_that_are(
    broker: EmbeddedServer, bus: Bus, command: str
) -> None:
    beat = Heartbeat("renderer", "renderer-x", "0", 1, ["demo", "other"], {})
    await bus.heartbeats.publish("renderer-x", to_json(beat))
    code, _, err = await run(broker, command, "--model", "nosuch", "hello")
    assert code == 1
    assert "unknown_model: no model 'nosuch'; served: demo, other" in err
    assert "pm." not in err
    await bus.purge(subjects.WORKERS_STREAM, subjects.heartbeat("renderer-x"))


async def test_a_preview_without_any_renderer_names_the_model(
    broker: EmbeddedServer, bus: Bus
) -> None:
    code, _, err = await run(broker, "render", "--model", "demo", "hello")
    assert code == 1
    assert "no renderer of demo is running" in err


async def test_ids_that_no_request_can_have_are_refused(broker: EmbeddedServer, bus: Bus) -> None:
    for command in ("follow", "cancel", "where"):
        code, _, err = await run(broker, command, "*")
        assert (code, "invalid_request" in err) == (1, True)


async def test_ask_sends_what_is_given_even_if_it_is_a_default(
    broker: EmbeddedServer, bus: Bus, request_id: str, nats_client: NatsClient
) -> None:
    options = ("--temperature", "1.0", "--request-id", request_id, "--model", request_id)
    subject = subjects.request(request_id, request_id)
    listener = await nats_client.subscribe(subject)
    await nats_client.flush()
    asking = asyncio.create_task(run(broker, "ask", *options, "hello"))
    message = await listener.next_msg(60)
    assert json.loads(message.data)["sampling_params"] == {"temperature": 1.0}
    await finish(bus, request_id)
    assert (await asking)[0] == 0
    await bus.purge(subjects.REQUESTS_STREAM, subject)


async def test_a_request_id_that_looks_like_markup_is_refused(broker: EmbeddedServer) -> None:
    code, _, err = await run(broker, "ask", "--request-id", "[/x]", "hello")
    assert (code, "invalid_request" in err) == (1, True)

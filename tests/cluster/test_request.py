"""The whole road through the public doors: NATS subjects, the command line, the two examples."""

import asyncio
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.client import Client
from PIL import Image

from ops.demo import IMAGES, Case
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.client import ask, follow, new_request_id
from shared.protocol import names, subjects
from shared.protocol.records import Failure, Finish, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from shared.state.token_log import last_record
from tests import preloaded
from tests.cluster.conftest import ROOT, Cluster, answer, living, request_text, sign_in
from tests.cluster.streams import assert_gapless, text_of, tokens_of
from tests.npm import install, needs_npm
from tests.renderer.media.test_media_attacks import jpeg_of_many_scans, webp
from tests.support.media import data_url
from workers.cli.ask import build_request

CASES = msgspec.json.decode((IMAGES / "questions.json").read_bytes(), type=list[Case])
RED = IMAGES / "red.png"


def png(size: tuple[int, int], colour: str = "red") -> bytes:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return out.getvalue()


def body(content: Any, **more: Any) -> dict[str, Any]:
    return {"model": "demo", "messages": [{"role": "user", "content": content}]} | more


def image(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


async def publish(bus: Bus, data: bytes, model: str = "demo") -> tuple[list[LogRecord], float]:
    """Raw bytes as a foreign client sends them; the log, and the seconds to its first record."""
    request_id = new_request_id()
    listener = await bus.subscribe(subjects.tokens(request_id))
    began = time.monotonic()
    await bus.publish_without_id(subjects.request(model, request_id), data)
    records: list[LogRecord] = []
    took_s = 0.0
    while not records or not isinstance(records[-1], Finish | Failure):
        live = await listener.next(10)
        assert live is not None
        took_s = took_s or time.monotonic() - began
        record = decode_record(live.data)
        assert isinstance(record, TokenChunk | Finish | Failure)
        records.append(record)
    await bus.unsubscribe(listener)
    return records, took_s


async def test_all_demo_questions_at_once_are_answered_right(client: Bus) -> None:
    async def one(case: Case) -> list[LogRecord]:
        images = [IMAGES / name for name in case.images]
        return await answer(client, build_request("demo", case.question, images, {}))

    for case, records in zip(CASES, await asyncio.gather(*map(one, CASES)), strict=True):
        assert_gapless(records)
        final = records[-1]
        assert isinstance(final, Finish)
        assert case.expect in text_of(records).lower()
        assert [hop.stage for hop in final.path] == ["coordinator", "renderer", "engine"]
        assert final.usage.completion_tokens == len(tokens_of(records))
        assert final.kv_blocks >= 1


async def test_the_famous_case(client: Bus) -> None:
    content = [
        image(data_url(png((224, 224)))),
        {"type": "text", "text": "What color is this image? Answer in one word."},
    ]
    sampling = {"max_tokens": 20, "temperature": 0.0}
    records, _ = await publish(client, json.dumps(body(content, sampling_params=sampling)).encode())
    assert "red" in text_of(records).lower()


async def test_a_request_in_msgpack(client: Bus) -> None:
    records, _ = await publish(client, msgspec.msgpack.encode(body("What can you do?")))
    assert isinstance(records[-1], Finish)


async def test_several_choices(client: Bus) -> None:
    records = await answer(
        client, request_text("What can you do?", n=3, temperature=1.0, seed=5, max_tokens=12)
    )
    assert_gapless(records)
    assert all(tokens_of(records, choice) for choice in range(3))


async def test_all_that_steers_sampling_arrives(client: Bus) -> None:
    """In JSON the ids of tokens are strings, for all keys are."""
    sampling = {
        "temperature": 0.0,
        "max_tokens": 4,
        "ignore_eos": True,
        "logit_bias": {"65": 100.0},
        "bad_words": ["red"],
        "min_tokens": 2,
        "logprobs": 1,
        "prompt_logprobs": 1,
    }
    request = body("What can you do?", sampling_params=sampling)
    records, _ = await publish(client, json.dumps(request).encode())
    assert tokens_of(records) == [65] * 4
    first = records[0]
    assert isinstance(first, TokenChunk)
    assert first.prompt_logprobs
    assert first.choices[0].logprobs


async def test_a_bias_for_an_unknown_token_is_an_error(client: Bus) -> None:
    sampling = {"logit_bias": {"9999999": 1.0}}
    request = body("What can you do?", sampling_params=sampling)
    records, _ = await publish(client, json.dumps(request).encode())
    (failure,) = records
    assert isinstance(failure, Failure)
    assert failure.error.code == "invalid_request"
    assert failure.error.field == "sampling_params.logit_bias"


async def test_the_same_id_again_reads_the_same_answer(client: Bus) -> None:
    request_id = new_request_id()
    request = request_text("What can you do?", temperature=1.0, seed=3)
    first = [record async for record in ask(client, request, request_id)]
    again = [record async for record in ask(client, request, request_id)]
    assert first == again


async def test_a_stop_string_ends_the_answer_before_it(client: Bus) -> None:
    whole = text_of(await answer(client, request_text("What can you do?")))
    stop = whole[len(whole) // 2 :][:3]
    records = await answer(client, request_text("What can you do?", stop=[stop]))
    assert text_of(records) == whole[: whole.index(stop)]


async def publish_for(cluster: Cluster, tenant: str, request: dict[str, Any]) -> LogRecord:
    """As a gateway does that knows its client; the last record."""
    login = Login.of_operator(cluster.url)
    client = await nats.connect(cluster.url, nkeys_seed=str(login.seed_file))
    request_id = names.scoped_id(new_request_id(), tenant)
    tokens = await client.subscribe(subjects.tokens(request_id))
    subject = subjects.request("demo", request_id)
    await client.jetstream().publish(subject, json.dumps(request).encode())
    while isinstance(record := decode_record((await tokens.next_msg(20)).data), TokenChunk):
        pass
    await client.close()
    assert isinstance(record, Finish | Failure)
    return record


async def num_encoded(bus: Bus) -> int:
    """Return the number of images that the engine has encoded, from its last heartbeat."""
    (beat,) = await living(bus, "engine")
    return int(beat.load["encoded_items"])


async def test_caches_are_each_tenants_own(cluster: Cluster, client: Bus) -> None:
    picture = image(data_url(png((224, 224), "orange")))
    request = body([picture, {"type": "text", "text": "What color is it, then?"}])
    await asyncio.sleep(1.5)  # until a heartbeat has all earlier images
    expected = await num_encoded(client)
    answers = []
    for tenant, hits in (("", False), ("", True), ("a", False), ("b", False), ("a", True)):
        final = await publish_for(cluster, tenant, request)
        assert isinstance(final, Finish)
        assert (final.usage.cached_tokens > 0) == hits
        expected += not hits
        deadline = time.monotonic() + 10
        while await num_encoded(client) < expected:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.2)
        answers.append(final.usage.completion_tokens)
    await asyncio.sleep(1.5)
    assert await num_encoded(client) == expected
    assert len(set(answers)) == 1


async def test_a_tenant_that_is_no_name_is_an_error(cluster: Cluster) -> None:
    failure = await publish_for(cluster, "a=b", body("What can you do?"))
    assert isinstance(failure, Failure)
    assert (failure.error.code, failure.error.field) == ("invalid_request", "request_id")


NOISE = zlib.compress(b"no picture at all")
BAD: dict[str, tuple[bytes | dict[str, Any], str, str | None]] = {
    "malformed JSON": (b'{"model": "demo", ', "invalid_request", None),
    "malformed msgpack": (b"\x83\xa5model\xc1", "invalid_request", None),
    "no messages": ({"model": "demo", "messages": []}, "invalid_request", "messages"),
    "unknown field": (body("hi", temperatur=1), "invalid_request", "temperatur"),
    "a tenant of the client's own": (body("hi", tenant="x"), "invalid_request", "tenant"),
    "unknown field of 2 MB": (body("hi", **{"x" * 2_000_000: 1}), "invalid_request", None),
    "a penalty that leaves no numbers": (
        body("hi", sampling_params={"repetition_penalty": 1e-40}),
        "invalid_request",
        "sampling_params.repetition_penalty",
    ),
    "unknown content part": (
        body([{"type": "smell"}]),
        "invalid_request",
        "messages[0].content[0].type",
    ),
    "unsupported content part": (
        body([{"type": "input_audio"}]),
        "unsupported_content",
        "messages[0].content[0].type",
    ),
    "sampling value out of range": (
        body("hi", sampling_params={"top_p": 1.5}),
        "invalid_request",
        "sampling_params.top_p",
    ),
    "broken base64": (
        body([image("data:image/png;base64,###")]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "no picture": (
        body([image(data_url(NOISE))]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "a truncated picture": (
        body([image(data_url((IMAGES / "red.png").read_bytes()[:100]))]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "a JPEG of 100,000 scans": (
        body([image(data_url(jpeg_of_many_scans(100_000)))]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "an animation": (
        body([image(data_url(webp((16_383, 16_383), 1000)))]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "too many pixels": (
        body([image(data_url(png((2001, 2000))))]),
        "media_too_large",
        "messages[0].content[0].image_url.url",
    ),
    "too many pictures": (
        body([image(data_url(png((28, 28))))] * 9),
        "media_too_large",
        "messages[0].content[8].image_url.url",
    ),
    "a file path": (
        body([image("file:///etc/passwd")]),
        "invalid_media",
        "messages[0].content[0].image_url.url",
    ),
    "a URL where none is allowed": (
        body([image("http://127.0.0.1:1/a.png")]),
        "media_url_blocked",
        "messages[0].content[0].image_url.url",
    ),
    "a prompt over the context": (body("word " * 4000), "context_length_exceeded", "messages"),
    "an answer over the context": (
        body("hi", sampling_params={"max_tokens": 5000}),
        "context_length_exceeded",
        "sampling_params.max_tokens",
    ),
    "a special token in the text": (
        body("What is <|image_pad|>?"),
        "invalid_request",
        "messages[0].content",
    ),
}


@pytest.mark.parametrize("name", BAD)
async def test_bad_input_gets_one_clear_error_and_harms_no_other_request(
    client: Bus, name: str
) -> None:
    bad, code, field = BAD[name]
    victim = request_text("What can you do?", ignore_eos=True, max_tokens=120)
    undisturbed = tokens_of(await answer(client, victim))
    running = asyncio.create_task(answer(client, victim))
    data = bad if isinstance(bad, bytes) else json.dumps(bad).encode()
    records, took_s = await publish(client, data)
    assert len(records) == 1
    failure = records[0]
    assert isinstance(failure, Failure)
    assert failure.error.code == code
    assert failure.error.field == field or name == "unknown field of 2 MB"
    assert (failure.error.fault, failure.error.retryable) == ("client", False)
    assert took_s < 1.0
    for leak in ("Traceback", "0x", "/site-packages/", str(ROOT)):
        assert leak not in failure.error.message
    assert tokens_of(await running) == undisturbed


async def test_the_error_of_an_unknown_model_lists_the_models(client: Bus) -> None:
    request = GenerateRequest("other", request_text("hi").messages)
    (failure,) = await answer(client, request)
    assert isinstance(failure, Failure)
    assert failure.error.code == "unknown_model"
    assert "demo" in failure.error.message


def run(*command: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, env=os.environ | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_ask_streams_to_the_terminal(cluster: Cluster) -> None:
    question = "What color is this image? Answer in one word."
    done = preloaded.run("ask", "--nats", cluster.url, f"@{RED} {question}")
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout.lower()
    assert re.fullmatch(r"request req-[0-9a-f]{16}\n", done.stderr)


def test_ask_prints_records_for_scripts(cluster: Cluster) -> None:
    done = preloaded.run("ask", "--nats", cluster.url, "--json", "What can you do?")
    records = [json.loads(line) for line in done.stdout.splitlines()]
    assert [record["index"] for record in records] == list(range(len(records)))
    assert records[-1]["type"] == "finish"
    assert re.fullmatch(r"request req-[0-9a-f]{16}\n", done.stderr)


def test_render_and_tokenize_print_what_an_engine_would_be_given(cluster: Cluster) -> None:
    arguments = ("--nats", cluster.url, f"What is it? @{RED}")
    done = preloaded.run("render", "--json", *arguments)
    assert done.returncode == 0, done.stderr
    rendered = json.loads(done.stdout)
    (item,) = rendered["items"]
    ids = rendered["prompt_token_ids"]
    assert len(set(ids[item["offset"] : item["offset"] + item["length"]])) == 1
    assert item["fields"]["pixel_patches"]["dtype"] == "uint8"
    plain = preloaded.run("render", *arguments)
    assert f"{len(ids)} tokens" in plain.stdout
    assert item["mm_hash"] in plain.stdout
    text = ("--nats", cluster.url, "What is it?")
    counted = json.loads(preloaded.run("tokenize", "--json", *text).stdout)
    assert counted["count"] == len(counted["token_ids"]) > 0
    assert counted["max_model_len"] == 1024
    assert f"{counted['count']} tokens" in preloaded.run("tokenize", *text).stdout
    refused = preloaded.run("render", "--nats", cluster.url, "What is <|image_pad|>?")
    assert refused.returncode == 1
    assert "invalid_request" in refused.stderr


def test_ask_says_what_is_wrong(cluster: Cluster, tmp_path: Path) -> None:
    missing = preloaded.run("ask", "--nats", cluster.url, "What? @no-such.png")
    assert missing.returncode == 1
    assert "no-such.png" in missing.stderr
    text = tmp_path / "text.png"
    text.write_text("not a picture")
    refused = preloaded.run("ask", "--nats", cluster.url, f"What? @{text}")
    assert refused.returncode == 1
    assert "invalid_media" in refused.stderr


def test_the_python_example_imports_nothing_of_ours(cluster: Cluster) -> None:
    example = ROOT / "ops" / "examples" / "ask.py"
    env = {"NATS_URL": cluster.url, "NATS_NKEY": str(cluster.client_key)}
    done = run(sys.executable, str(example), "What color is it?", str(RED), **env)
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout.lower()
    source = example.read_text()
    assert "shared" not in source
    assert "workers" not in source


async def ask_as(
    nc: Client, request_id: str, question: dict[str, Any], *, cancel_first: bool = False
) -> LogRecord:
    """Ask as the client of a tenant, whose header names another one; the last record."""
    log = await nc.subscribe(f"pm.tokens.{request_id}")
    if cancel_first:
        # It writes the last record, maybe before the request has been sent.
        await nc.request(f"pm.cancel.{request_id}", b"", timeout=60)
    data, headers = json.dumps(question).encode(), {"Pagemill-Tenant": "acme"}
    await nc.request(f"pm.request.demo.{request_id}", data, headers=headers, timeout=60)
    while isinstance(record := decode_record((await log.next_msg(60)).data), TokenChunk):
        pass
    assert isinstance(record, Finish | Failure)
    return record


async def test_clients_of_tenants_are_apart(cluster: Cluster, client: Bus) -> None:
    """A tenant is added while all runs: its requests, logs, cancellations and caches."""
    options = ("--config", str(cluster.config), "--dir", str(cluster.keys))
    folder = cluster.config.parent
    done = await asyncio.to_thread(
        preloaded.run, "keys", "add-tenant", "acme", *options, cwd=folder
    )
    key = cluster.keys / "tenants" / "acme.nk"
    assert done.stdout.strip() == str(key), done.stderr
    acme, local = await sign_in(cluster, key), await sign_in(cluster, cluster.client_key)
    name = new_request_id()
    question = body(f"{name}: What can you do? " * 20)
    for nc in (acme, local):
        end = await ask_as(nc, name, question)
        assert isinstance(end, Finish)
        assert end.usage.cached_tokens == 0
    for tenant in ("acme", "local"):
        scoped = f"{name}@{tenant}"
        records = [record async for record in follow(client, scoped)]
        assert isinstance(records[-1], Finish)
        where = await asyncio.to_thread(preloaded.run, "where", scoped, "--nats", cluster.url)
        assert "finished" in where.stdout
    assert await last_record(client, name) is None
    # A cancellation that comes first ends the request of its tenant alone.
    name = new_request_id()
    end = await ask_as(local, name, question, cancel_first=True)
    assert isinstance(end, Failure)
    assert end.error.code == "cancelled"
    assert isinstance(await ask_as(acme, name, question), Finish)
    await acme.close()
    await local.close()


async def test_no_key_is_shown_and_no_worker_is_refused(cluster: Cluster, client: Bus) -> None:
    seeds = [file.read_bytes().strip() for file in cluster.keys.rglob("*.nk")]
    assert len(seeds) > 10
    folder = cluster.config.parent
    server_log = (folder / "data" / "nats" / "nats-server.log").read_bytes()
    texts = [server_log, cluster.log.read_bytes(), (folder / "up.err").read_bytes()]
    for pid in {beat.pid for beat in await client.heartbeats.read()} | {cluster.process.pid}:
        process = Path("/proc") / str(pid)
        texts += [(process / "cmdline").read_bytes(), (process / "environ").read_bytes()]
    stored = await client.read(subjects.WORKERS_STREAM, subjects.WORKERS_FILTER)
    texts += [message.data for message in stored]
    assert not any(seed in data for seed in seeds for data in texts)
    # Whatever the tests before had the workers do, their permissions cover it.
    violations = [line for line in server_log.splitlines() if b"Violation" in line]
    assert [line for line in violations if b"PAGEMILL" in line] == []


@needs_npm
def test_the_node_example(cluster: Cluster, tmp_path: Path) -> None:
    for name in ("ask.mjs", "package.json", "package-lock.json"):
        shutil.copy(ROOT / "ops" / "examples" / name, tmp_path)
    install(tmp_path)
    env = {"NATS_URL": cluster.url, "NATS_NKEY": str(cluster.client_key)}
    done = run("node", str(tmp_path / "ask.mjs"), "What color is it?", str(RED), **env)
    assert done.returncode == 0, done.stderr
    assert "red" in done.stdout.lower()

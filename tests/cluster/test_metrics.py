"""Numbers of a whole Pagemill: equal to what was served, by every road on which they can be had."""

import asyncio
import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.bus.embedded_server import free_port
from shared.client import ask, new_request_id
from shared.protocol.records import Failure, Finish
from shared.protocol.requests import GenerateRequest, Message
from tests.cluster.conftest import (
    CONFIG,
    FORKED_PAGEMILL,
    ROOT,
    Cluster,
    living,
    request_text,
    start_cluster,
    stop_cluster,
)
from tests.support.waiting import wait_until
from workers.cli.ask import build_request

METRICS = "metrics: {listen: 127.0.0.1, port: 0}\n"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A separate cluster, which has counted nothing else."""
    running = start_cluster(tmp_path_factory.mktemp("metrics"), CONFIG + METRICS)
    yield running
    stop_cluster(running)


def command(cluster: Cluster, *arguments: str) -> str:
    done = subprocess.run(
        [*FORKED_PAGEMILL, *arguments, "--nats", cluster.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stderr == ""
    return done.stdout


Values = dict[tuple[str, str], float]


def values(text: str) -> Values:
    """Return sums over all workers, by the name of the metric and its most specific label."""
    sums: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = sample.labels
            own = labels.get("finished_reason") or labels.get("code") or labels.get("role", "")
            if "le" not in labels:
                key = (sample.name.removeprefix("pagemill_"), own)
                sums[key] = sums.get(key, 0.0) + sample.value
    return sums


async def settled(cluster: Cluster, num_requests: int) -> Values:
    """As soon as the engine has counted what its clients have seen end."""
    deadline = time.monotonic() + 20
    while True:
        sums = values(await asyncio.to_thread(command, cluster, "metrics"))
        if sums["stage_handling_seconds_count", "engine"] == num_requests:
            return sums
        assert time.monotonic() < deadline
        await asyncio.sleep(0.2)


async def final_record(bus: Bus, request: GenerateRequest) -> Finish | Failure:
    last = [record async for record in ask(bus, request, new_request_id())][-1]
    assert isinstance(last, Finish | Failure)
    return last


async def test_counters_are_what_was_served(cluster: Cluster, client: Bus) -> None:
    red = build_request(
        "demo", "What color is this image?", [IMAGES / "red.png"], {"max_tokens": 5}
    )
    long = "What can you do? " * 8
    requests = [red, *(request_text(long, max_tokens=7, n=2, ignore_eos=True) for _ in range(3))]
    finals = [await final_record(client, request) for request in [*requests, red]]
    finals += await asyncio.gather(*(final_record(client, request) for request in requests))
    stranger = GenerateRequest("stranger", [Message("user", "hi")])
    refused = await final_record(client, stranger)
    assert isinstance(refused, Failure)
    usages = [final.usage for final in finals if isinstance(final, Finish)]
    assert len(usages) == len(finals)
    assert any(usage.cached_tokens for usage in usages)

    sums = await settled(cluster, len(usages))
    out = sum(usage.completion_tokens for usage in usages)
    num_choices = sum(2 if usage.completion_tokens == 14 else 1 for usage in usages)
    prompts = sum(usage.prompt_tokens for usage in usages)
    reasons = sums["request_success_total", "stop"] + sums["request_success_total", "length"]
    assert reasons == len(usages)
    assert sums["request_success_total", "length"] >= 6
    for name, count in {
        "prompt_tokens_total": prompts,
        "generation_tokens_total": out,
        "inter_token_latency_seconds_count": out - num_choices,
        "time_to_first_token_seconds_count": len(usages),
        "request_queue_time_seconds_count": len(usages),
        "e2e_request_latency_seconds_count": len(usages),
        "stage_queue_seconds_count": len(usages),
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "up": 1,
    }.items():
        assert sums[name, "engine"] == count, name
    # The second of two choices of one prompt finds what the first has computed.
    cached = sum(usage.cached_tokens for usage in usages)
    assert sums["prefix_cache_queries_total", "engine"] >= prompts
    assert sums["prefix_cache_hits_total", "engine"] >= cached
    assert sums["mm_cache_queries_total", "renderer"] == 3
    assert sums["mm_cache_hits_total", "renderer"] == 2
    assert sums["rendered_requests_total", "renderer"] == len(usages)
    assert sums["requests_accepted_total", "coordinator"] == len(usages)
    assert sums["request_errors_total", refused.error.code] == 1
    assert sums["stage_queue_seconds_count", "coordinator"] == len(usages) + 1
    assert sums["requests_in_flight", ""] == sums["dead_letters", ""] == 0
    assert sums["queue_pending", "engine"] == sums["queue_ack_pending", "engine"] == 0

    frame = json.loads(command(cluster, "top", "--once", "--json", "--interval", "0.2"))
    totals = {
        "prompt_tokens": prompts,
        "generation_tokens": out,
        "requests": len(usages),
        "prefix_queries": sums["prefix_cache_queries_total", "engine"],
        "prefix_hits": sums["prefix_cache_hits_total", "engine"],
        "preemptions": 0,
    }
    assert [row["totals"] for row in frame["models"]] == [totals]
    assert [row["totals"] for row in frame["engines"]] == [totals]
    assert {(pool["role"], pool["workers"], pool["silent"]) for pool in frame["pools"]} == {
        ("coordinator", 1, 0),
        ("renderer", 1, 0),
        ("engine", 1, 0),
        ("gateway", 1, 0),
    }
    assert [(queue["stage"], queue["lane"]) for queue in frame["queues"]] == [
        ("coordinator", ""),
        ("engine", "interactive"),
        ("engine", "batch"),
        ("renderer", "interactive"),
        ("renderer", "batch"),
    ]


def test_no_label_is_of_a_clients_choosing(cluster: Cluster) -> None:
    """A refused request does not leave a series either: row S58."""
    assert "stranger" not in command(cluster, "metrics")


async def test_every_worker_serves_its_own_where_its_heartbeat_says(
    cluster: Cluster, client: Bus
) -> None:
    ports = set()
    for role in ("coordinator", "renderer", "engine"):
        (beat,) = await living(client, role)
        assert beat.metrics is not None
        host, port = beat.metrics
        ports.add(port)
        url = f"http://{host}:{port}/metrics"
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=10) as answer:
            text = answer.read().decode()
        workers = {
            sample.labels["worker"]
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert workers == {beat.worker}
    assert len(ports) == 3


@contextlib.contextmanager
def running(*arguments: str, **streams: Any) -> Iterator[subprocess.Popen[str]]:
    """Run a command until Ctrl-C, which must end it without a message."""
    with subprocess.Popen(
        [*FORKED_PAGEMILL, *arguments], cwd=ROOT, text=True, **streams
    ) as process:
        try:
            yield process
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        finally:
            process.kill()


async def test_every_worker_reports_its_health_and_whether_it_takes_work(
    cluster: Cluster, client: Bus
) -> None:
    beats = await client.heartbeats.read()
    assert {"coordinator", "renderer", "engine", "gateway"} <= {beat.role for beat in beats}
    async with httpx.AsyncClient(timeout=30) as http:
        for beat in beats:
            assert beat.metrics is not None
            host, port = beat.metrics
            for path in ("health", "ready"):
                answer = await http.get(f"http://{host}:{port}/{path}")
                assert answer.status_code == 200
                health = answer.json()
                assert (health["role"], health["worker"]) == (beat.role, beat.worker)
                assert health["status"] == "ok"


@contextlib.contextmanager
def serving_all(cluster: Cluster) -> Iterator[str]:
    """Yield the URL of the metrics of the whole cluster."""
    arguments = ("metrics", "--listen", "127.0.0.1:0", "--nats", cluster.url)
    with running(*arguments, stderr=subprocess.PIPE) as process:
        assert process.stderr is not None
        yield process.stderr.readline().split()[2].removesuffix(";")


def test_the_whole_cluster_is_served_on_one_address(cluster: Cluster) -> None:
    with serving_all(cluster) as url:
        for _ in range(2):
            with urllib.request.urlopen(url, timeout=10) as answer:
                sums = values(answer.read().decode())
            assert sums["broker_up", ""] == 1
            assert [sums["up", role] for role in ("coordinator", "renderer", "engine")] == [1] * 3


@contextlib.contextmanager
def prometheus(folder: Path, targets: list[str]) -> Iterator[httpx.Client]:
    """Run Prometheus with the alert rules."""
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(ROOT / "ops/monitoring/alerts.yml")],
        "scrape_configs": [{"job_name": "pagemill", "static_configs": [{"targets": targets}]}],
    }
    folder.mkdir()
    (folder / "prometheus.yml").write_text(json.dumps(config))
    address = f"127.0.0.1:{free_port()}"
    options = {
        "config.file": folder / "prometheus.yml",
        "storage.tsdb.path": folder / "data",
        "web.listen-address": address,
    }
    command = ["prometheus", *(f"--{name}={value}" for name, value in options.items())]
    with (folder / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        with httpx.Client(base_url=f"http://{address}/api/v1") as api:
            yield api
    finally:
        server.kill()
        server.wait()


def evaluated_rules(api: httpx.Client, num_targets: int) -> list[dict[str, Any]]:
    """Return the alert rules as evaluated once all targets have been scraped."""

    def is_scraped() -> bool:
        time.sleep(0.2)
        try:
            answer = api.get("/query", params={"query": "sum(up)"})
        except httpx.ConnectError:
            return False
        samples = answer.json()["data"]["result"] if answer.is_success else []
        return [sample["value"][1] for sample in samples] == [str(num_targets)]

    def rules_since(time_utc: str) -> list[dict[str, Any]]:
        time.sleep(0.2)
        groups = api.get("/rules").json()["data"]["groups"]
        rules = [rule for group in groups for rule in group["rules"]]
        return rules if all(rule["lastEvaluation"] > time_utc for rule in rules) else []

    wait_until(is_scraped)
    now = datetime.now(UTC).isoformat()
    return list(wait_until(lambda: rules_since(now)))


@pytest.mark.skipif(shutil.which("prometheus") is None, reason="needs Debian's package prometheus")
async def test_no_alert_is_pending_in_a_healthy_cluster(
    cluster: Cluster, client: Bus, tmp_path: Path
) -> None:
    beats = await client.heartbeats.read()
    workers = [f"{host}:{port}" for beat in beats for host, port in [beat.metrics or ("", 0)]]
    with serving_all(cluster) as url, contextlib.ExitStack() as stack:
        modes = {"all": [url.split("/")[2]], "each": workers}
        servers = [
            (stack.enter_context(prometheus(tmp_path / mode, targets)), len(targets))
            for mode, targets in modes.items()
        ]
        for api, num_targets in servers:
            rules = await asyncio.to_thread(evaluated_rules, api, num_targets)
            assert {rule["health"] for rule in rules} == {"ok"}
            assert [rule["name"] for rule in rules if rule["state"] != "inactive"] == []


def test_what_goes_into_a_pipe_is_plain(cluster: Cluster) -> None:
    arguments = ("top", "--interval", "0.1", "--nats", cluster.url)
    with running(*arguments, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(60)]
    assert sum(line.startswith("pagemill ") for line in lines) >= 2
    assert sum(line.startswith("engine-") for line in lines) >= 2
    assert not any("\x1b" in line or "Traceback" in line for line in lines)


def test_a_terminal_is_left_as_it_was(cluster: Cluster) -> None:
    leader, follower = os.openpty()
    env = os.environ | {"TERM": "xterm", "COLUMNS": "120", "LINES": "40"}
    arguments = ("top", "--interval", "0.1", "--nats", cluster.url)
    streams: dict[str, Any] = {"stdin": follower, "stdout": follower, "stderr": follower}
    written = b""
    with running(*arguments, env=env, **streams):
        while written.count(b"in flight") < 3:
            written += os.read(leader, 65536)
    os.close(follower)
    with contextlib.suppress(OSError):  # raised at the end of a terminal
        while data := os.read(leader, 65536):
            written += data
    os.close(leader)
    entered, left, hidden, visible = b"\x1b[?1049h", b"\x1b[?1049l", b"\x1b[?25l", b"\x1b[?25h"
    assert written.count(entered) == written.count(left) == 1
    assert written.rindex(visible) > written.rindex(hidden)
    assert b"Traceback" not in written


def test_top_waits_for_a_broker_and_says_so(tmp_path: Path) -> None:
    arguments = ("top", "--json", "--interval", "0.1", "--nats", "nats://127.0.0.1:9")
    with running(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        lines = [json.loads(process.stdout.readline()) for _ in range(2)]
    reason = (
        "Pagemill is not running (no broker answers at nats://127.0.0.1:9): start `pagemill up`"
    )
    assert lines == 2 * [{"error": reason}]

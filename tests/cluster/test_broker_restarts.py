"""The broker of two engines is killed several times: each engine keeps its requests."""

import asyncio
import itertools
import json
from collections import Counter
from collections.abc import Iterator

import pytest

from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.protocol.records import Finish, LogRecord
from shared.protocol.requests import GenerateRequest
from tests.cluster.conftest import CONFIG, Cluster, request_text, start_cluster, stop_cluster
from tests.cluster.streams import assert_gapless
from tests.cluster.test_lost_tasks import kill_broker
from tests.support.waiting import until

RESTARTS = 3
# Each engine has room for requests of the other.
CLIENTS = 12
TWO_ENGINES = (
    CONFIG.replace(
        "    max_model_len: 1024", "    max_model_len: 1024\n    stages: {engine: {replicas: 2}}"
    )
    + "engine: {max_num_seqs: 8}\n"
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("restarts"), TWO_ENGINES)
    yield running
    stop_cluster(running)


def long_request(number: int) -> GenerateRequest:
    return request_text(f"{number}: what can you do?", ignore_eos=True, max_tokens=900)


async def answers_amid_restarts(
    cluster: Cluster, bus: Bus, restarts: int
) -> dict[str, list[LogRecord]]:
    """Ask again and again, and return all answers; the broker is killed while engines write."""
    answers: dict[str, list[LogRecord]] = {}
    numbers, is_over, writes = itertools.count(), False, Counter[str]()

    async def ask_until_over() -> None:
        while not is_over:
            request_id = new_request_id()
            answers[request_id] = []
            async for record in ask(bus, long_request(next(numbers)), request_id):
                answers[request_id].append(record)
                writes[request_id] += 1

    async with asyncio.TaskGroup() as group:
        for _ in range(CLIENTS):
            group.create_task(ask_until_over())
        for _ in range(restarts):
            writes.clear()
            await until(lambda: sum(count > 3 for count in writes.values()) >= CLIENTS // 2)
            kill_broker(cluster)
        is_over = True
    return answers


def beginnings(cluster: Cluster) -> Counter[str]:
    """Return how often engines began each request."""
    lines = map(json.loads, cluster.log.read_text().splitlines())
    return Counter(line["request_id"] for line in lines if line["event"] == "began")


async def test_requests_begin_once_although_the_broker_restarts(
    cluster: Cluster, client: Bus
) -> None:
    answers = await answers_amid_restarts(cluster, client, RESTARTS)
    for records in answers.values():
        assert_gapless(records)
        assert isinstance(records[-1], Finish)
    assert beginnings(cluster) == dict.fromkeys(answers, 1)

"""Prompts with images computed apart, of the embeddings that encoders have made."""

from collections.abc import Iterator

import pytest

from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.protocol.requests import GenerateRequest
from tests.cluster.conftest import CONFIG, Cluster, answer, start_cluster, stop_cluster
from tests.cluster.test_prefill import (
    PICTURES,
    assert_alone_the_same,
    finish_of,
    is_detoured,
    until_all_payloads_are_released,
)
from workers.cli.ask import build_request

BOTH = CONFIG.replace(
    "max_model_len: 1024",
    "max_model_len: 1024\n    dtype: float64\n    tower: encoder\n    prefill: prefill"
    "\n    min_prefill_tokens: 16",
)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    running = start_cluster(tmp_path_factory.mktemp("prefill-encoders"), BOTH)
    yield running
    stop_cluster(running)


def ask_about(picture: str, number: int) -> GenerateRequest:
    sampling = {"max_tokens": 16, "temperature": 0.0, "ignore_eos": True}
    # The prompts differ, because an engine does not read blocks that it has cached.
    text = f"{number} what color is the large shape in the image {number}"
    return build_request("demo", text, [IMAGES / picture], sampling)


async def test_prefill_workers_compute_prompts_with_the_embeddings_of_encoders(client: Bus) -> None:
    logs, requests = [], []
    # On a busy machine a worker may not be ready yet, or the blocks may come too late.
    for number in range(100):
        request = ask_about(PICTURES[number % len(PICTURES)], number)
        records = await answer(client, request)
        usage, stages = finish_of(records).usage, [s.stage for s in finish_of(records).path]
        if is_detoured(records) and usage.prompt_tokens - usage.cached_tokens <= 8:
            assert stages.index("prefill") < stages.index("engine")
            requests.append(request)
            logs.append(records)
        if len(logs) == len(PICTURES):
            break
    assert len(logs) == len(PICTURES)
    await assert_alone_the_same(client, requests, logs)
    await until_all_payloads_are_released(client)

"""Ten batches of three tenants share by weight, and a small batch does not wait for them."""

import hashlib
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from openai import AsyncOpenAI, NotFoundError

from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl, results_of
from tests.gateway.conftest import Process
from tests.support.waiting import until
from workers.gateway.batches.slots import MIN_SLOTS

WEIGHTS = {"ann": 1.0, "ben": 2.0, "cat": 4.0}
NUM_BATCHES = {"ann": 1, "ben": 3, "cat": 6}
LINES = {"ann": 150, "ben": 100, "cat": 100}
"""Lines of each batch. No tenant runs dry before `NUM_COUNTED` lines."""
NUM_COUNTED = 700
TENANTS = (*WEIGHTS, "dan")


def key_of(tenant: str) -> dict[str, str]:
    return {"name": tenant, "sha256": hashlib.sha256(f"pm-{tenant}".encode()).hexdigest()}


SECTIONS: dict[str, Any] = {
    "delivery": {"ack_wait_s": 1.5, "drain_s": 2.0, "tenant_weights": WEIGHTS},
    "gateway": {"port": 0, "api_keys": [key_of(tenant) for tenant in TENANTS]},
}


@pytest.fixture
async def clients(rig: BatchRig) -> AsyncIterator[dict[str, AsyncOpenAI]]:
    url = f"{rig.gateway.url}/v1"
    async with AsyncExitStack() as stack:
        yield {
            tenant: await stack.enter_async_context(
                AsyncOpenAI(base_url=url, api_key=f"pm-{tenant}", max_retries=0, timeout=60)
            )
            for tenant in TENANTS
        }


async def is_running(client: AsyncOpenAI, batch_id: str) -> bool:
    return (await client.batches.retrieve(batch_id)).status == "in_progress"


@pytest.mark.long
async def test_ten_batches_of_three_tenants_share_by_weight(
    rig: BatchRig, clients: dict[str, AsyncOpenAI], batcher: Process
) -> None:
    tenant_of: dict[str, str] = {}
    with rig.model.held_after(0):
        for tenant, number in NUM_BATCHES.items():
            for window in range(number):
                # The lightest tenant has the window that ends first.
                content = jsonl([chat_line(n) for n in range(LINES[tenant])])
                hours = window + 5 * WEIGHTS[tenant]
                batch = await begin(clients[tenant], content, f"{hours:.0f}h")
                tenant_of[batch.id] = tenant
        for batch_id, tenant in tenant_of.items():
            await until(partial(is_running, clients[tenant], batch_id))
        rig.model.num_free = NUM_COUNTED

        def has_answered() -> bool:
            return rig.model.answered.total() >= NUM_COUNTED

        await until(has_answered, 120)
        answered = Counter(
            tenant_of[name.rpartition("-")[0].rpartition("-")[0]] for name in names_of(rig)
        )
        small = await begin(clients["dan"], jsonl([chat_line(n) for n in range(20)]))
        await until(partial(is_running, clients["dan"], small.id))

        async def small_has_ended() -> bool:
            rig.model.num_free = MIN_SLOTS
            return not await is_running(clients["dan"], small.id)

        await until(small_has_ended)
        for tenant in NUM_BATCHES:
            names = [name for name, owner in tenant_of.items() if owner == tenant]
            assert any([await is_running(clients[tenant], name) for name in names])
    shares = {tenant: number / answered.total() for tenant, number in answered.items()}
    expected = {tenant: weight / sum(WEIGHTS.values()) for tenant, weight in WEIGHTS.items()}
    assert shares == pytest.approx(expected, rel=0.1)

    assert (await ended(clients["dan"], small.id)).status == "completed"
    for batch_id, tenant in tenant_of.items():
        batch = await ended(clients[tenant], batch_id)
        assert batch.status == "completed"
        assert len(await results_of(clients[tenant], batch.output_file_id)) == LINES[tenant]


def names_of(rig: BatchRig) -> list[str]:
    """Return the ids of all answered requests, without their tenants."""
    return [name.partition("@")[0] for name in rig.model.answered]


async def test_files_of_other_tenants_are_not_found(
    clients: dict[str, AsyncOpenAI], batcher: Process
) -> None:
    content = jsonl([chat_line(0)])
    file = await clients["ann"].files.create(file=("a.jsonl", content), purpose="batch")
    with pytest.raises(NotFoundError):
        await clients["ben"].batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )

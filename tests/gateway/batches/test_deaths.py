"""Batches whose batchers die."""

import pytest
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.errors import NotFound
from shared.protocol import names
from shared.state import dead_letters, request_status
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl
from tests.support.waiting import until

# A dead batcher is not alive any more when its batch is delivered again.
SECTIONS = {"batch": {"max_deaths": 1}, "delivery": {"ack_wait_s": 3.0, "drain_s": 2.0}}


async def test_a_batch_whose_batcher_dies_is_given_up_and_a_request_with_its_id_is_not(
    client: AsyncOpenAI, rig: BatchRig, batch_bus: Bus
) -> None:
    rig.start_batcher()
    with rig.model.held_after(0):
        batch = await begin(client, jsonl([chat_line(1)]))
        await until(lambda: rig.model.num_held > 0)
        rig.kill_batcher()
        rig.start_batcher()
        batch = await ended(client, batch.id)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [error.code for error in batch.errors.data] == ["poison"]
    letter = (await dead_letters.find(batch_bus, names.job_id("batch", batch.id, ""))).letter
    assert (letter.role, letter.error.code, len(letter.history)) == ("batcher", "poison", 1)
    with pytest.raises(NotFound):
        await dead_letters.find(batch_bus, batch.id)
    assert (await request_status.find(batch_bus, batch.id)).attempts == []

"""The list of a request's ended outputs on a real server."""

import asyncio

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.pipeline import ENDS
from shared.protocol.records import OutputSummary, Usage
from shared.state import output_ends

OUTPUTS = ["text", "audio", "image"]


async def test_the_list_is_written_once(bus: Bus, request_id: str) -> None:
    assert await output_ends.expected(bus, request_id) == []
    await asyncio.gather(*(output_ends.begin(bus, request_id, OUTPUTS) for _ in range(4)))
    await output_ends.add(bus, request_id, "text", OutputSummary())
    await output_ends.begin(bus, request_id, ["another"])
    assert await output_ends.expected(bus, request_id) == OUTPUTS
    assert len(await bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, ENDS))) == 2


async def test_exactly_one_of_concurrent_ends_completes_the_list(bus: Bus, request_id: str) -> None:
    await output_ends.begin(bus, request_id, OUTPUTS)
    summaries = {name: OutputSummary(Usage(1, n)) for n, name in enumerate(OUTPUTS)}
    lists = await asyncio.gather(
        *(output_ends.add(bus, request_id, name, end) for name, end in summaries.items())
    )
    assert sorted(len(ends.ended) for ends in lists) == [1, 2, 3]
    assert [output_ends.is_complete(ends) for ends in lists].count(True) == 1
    (complete,) = (ends for ends in lists if output_ends.is_complete(ends))
    assert complete.ended == summaries


async def test_an_end_that_is_noted_again_changes_nothing(bus: Bus, request_id: str) -> None:
    await output_ends.begin(bus, request_id, ["text", "audio"])
    first = await output_ends.add(bus, request_id, "text", OutputSummary(kv_blocks=1))
    again = await output_ends.add(bus, request_id, "text", OutputSummary(kv_blocks=2))
    assert again == first
    assert not output_ends.is_complete(again)
    assert output_ends.is_complete(await output_ends.add(bus, request_id, "audio", OutputSummary()))
    # A stage that lost its acknowledgement reads a complete list, and ends the request again.
    assert output_ends.is_complete(await output_ends.add(bus, request_id, "text", OutputSummary()))


async def test_bytes_that_are_no_list_are_skipped(bus: Bus, request_id: str) -> None:
    async def publish_foreign() -> None:
        await bus.publish_without_id(subjects.append(request_id, ENDS), b"\xff")

    await publish_foreign()
    assert await output_ends.expected(bus, request_id) == []
    await output_ends.begin(bus, request_id, ["text"])
    await publish_foreign()
    assert await output_ends.expected(bus, request_id) == ["text"]
    ends = await output_ends.add(bus, request_id, "text", OutputSummary())
    await publish_foreign()
    assert await output_ends.add(bus, request_id, "text", OutputSummary()) == ends

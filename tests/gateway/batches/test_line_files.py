"""Files that lines name are stored for as long as batches, and are media when a line runs."""

import json

import pytest
from openai import AsyncOpenAI

from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.state import media_store
from shared.state.batch_files import MediaLender
from tests.gateway.batches.conftest import BatchRig, begin, chat_line, ended, jsonl, results_of
from tests.gateway.conftest import Process

CONTENT = b"the bytes of an image" * 50_000


@pytest.mark.parametrize("scheme", ["media:", "media:file-"])
async def test_a_line_finds_its_file_after_media_have_expired(
    client: AsyncOpenAI, rig: BatchRig, batcher: Process, batch_bus: Bus, scheme: str
) -> None:
    content = CONTENT + scheme.encode()
    file = await client.files.create(file=("a.png", content), purpose="batch")
    name = file.id.removeprefix("file-")
    # It is not among the media, which expire.
    assert await media_store.find(batch_bus, name, 2**30) is None
    image = {"type": "image_url", "image_url": {"url": f"{scheme}{name}"}}
    messages = [{"role": "user", "content": [image]}]
    batch = await begin(client, jsonl([chat_line(n, messages=messages) for n in range(3)]))
    batch = await ended(client, batch.id)
    assert (await results_of(client, batch.output_file_id)).keys() == {"line-0", "line-1", "line-2"}
    assert await media_store.find(batch_bus, name, 2**30) == content
    await batch_bus.purge(subjects.MEDIA_STREAM, subjects.MEDIA_FILTER)
    batch = await begin(client, jsonl([chat_line(7, messages=messages)]))
    await ended(client, batch.id)
    assert await media_store.find(batch_bus, name, 2**30) == content


async def test_many_names_in_a_line_read_few_files(batch_bus: Bus, rig: BatchRig) -> None:
    names = [f"{number:064x}" for number in range(2000)]
    lender = MediaLender(batch_bus, max_bytes=2**20)
    await lender.lend(json.dumps(names).encode(), "")
    body = " ".join(f"media:{name}" for name in names).encode()
    await lender.lend(body, "")
    assert await media_store.look_up(batch_bus, names[0]) is None

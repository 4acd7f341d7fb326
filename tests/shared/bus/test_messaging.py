"""Names of models in subjects and consumers, and calls of newer versions to older responders."""

import asyncio
import secrets

import pytest

from shared.bus.bus import Bus
from shared.client import tokenize
from shared.errors import UnsupportedVersion
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.renderer_rpc import Tokenized, TokenizeRequest
from shared.protocol.requests import AudioPart, AudioURL, Message
from shared.protocol.versions import VERSION_HEADER


async def reply(data: bytes, *_: object) -> bytes:
    return data


async def test_an_older_responder_says_what_it_reads(bus: Bus) -> None:
    subject = f"test.{secrets.token_hex(4)}"
    await bus.add_group_responder(subject, "group", reply)
    assert await bus.request(subject, b"a", 5, version=3) == b"a"
    with pytest.raises(UnsupportedVersion, match="call has version 4, which a worker cannot read"):
        await bus.request(subject, b"a", 5, version=4)


async def test_a_call_is_repeated_until_a_renderer_reads_it(bus: Bus) -> None:
    """The older renderer is one of version 2: it answers a call that needs 3 with its version."""
    model = f"m-{secrets.token_hex(4)}"
    subject = subjects.renderer("tokenize", model)
    versions = []

    async def answer(*_: object) -> bytes:
        return to_json(Tokenized(1, 2, [3]))

    async def be_older(msg: object) -> None:
        headers = msg.headers  # type: ignore[attr-defined]
        versions.append(headers[VERSION_HEADER])
        await bus.connection.nc.publish(msg.reply, b"", headers={VERSION_HEADER: "2"})  # type: ignore[attr-defined]
        if len(versions) == 2:
            await bus.add_group_responder(subject, subjects.RENDERERS_GROUP, answer)
            await older.unsubscribe()

    older = await bus.connection.nc.subscribe(subject, subjects.RENDERERS_GROUP, cb=be_older)
    question = TokenizeRequest(messages=[Message("user", [AudioPart(AudioURL("data:,"))])])
    assert await tokenize(bus, model, question) == Tokenized(1, 2, [3])
    assert versions == ["3", "3"]


@pytest.mark.parametrize("name", ["org/Qwen2.5-VL 7B*", "模型" * 11, "." * 66])
@pytest.mark.parametrize("stage", ["renderer", "to_speech"])
async def test_the_broker_takes_a_name_as_subject_and_as_consumer(
    bus: Bus, name: str, stage: str
) -> None:
    lane = "interactive"
    durable, where = (
        subjects.stage_consumer(stage, name, lane),
        subjects.stage_filter(stage, name, lane),
    )
    consumer = await bus.queues.consume(subjects.STAGES_STREAM, durable, where, 1, 10.0)
    await bus.publish(subjects.stage(stage, name, lane, "r1"), b"task", f"{durable}:1")
    delivery = await asyncio.wait_for(consumer.next(), 20)
    assert subjects.parts_of_stage(delivery.subject) == (stage, name, lane)
    await delivery.ack()
    assert durable.startswith(f"{stage.replace('_', '=5F')}_")
    assert (await bus.figures.depth(subjects.STAGES_STREAM, durable)).subject == where

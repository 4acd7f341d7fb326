"""Versions of a coordinator's tasks: an older worker leaves those that it would misread."""

import secrets
from types import SimpleNamespace
from typing import Any

import pytest
import structlog

from shared.bus.bus import Bus
from shared.config import Config, ModelConfig
from shared.errors import UnsupportedVersion
from shared.protocol import subjects, versions
from shared.protocol.requests import EmbeddingParams, GenerateRequest, encode_request
from shared.protocol.task_messages import RenderBody
from shared.stage import tasks
from shared.stage.job import Job
from shared.stage.runtime import Context
from workers.coordinator.worker import Coordinator


async def publish_first_task(bus: Bus, embedding: EmbeddingParams | None) -> bytes:
    """Return the task that a coordinator makes of a request."""

    async def retry(after_s: float) -> None:
        pass

    request_id = f"r-{secrets.token_hex(8)}"
    delivery: Any = SimpleNamespace(
        subject=subjects.request("demo"),
        data=encode_request(GenerateRequest("demo", prompt="a", embedding=embedding), {}),
        stored_ms=bus.now_ms(),
        attempt=1,
        sequence=1,
        receipt="r",
        tenant=None,
        msg_id=request_id,
        headers={},
        retry=retry,
    )
    config = Config({"demo": ModelConfig("nowhere")})
    context = Context("coordinator", "coordinator-1", "", config, bus, structlog.get_logger())
    await Coordinator(context)._admit_or_end(Job(delivery, bus.now_ms(), request_id))
    stored = await bus.read_last(subjects.STAGES_STREAM, subjects.stages_of(request_id))
    assert stored is not None
    return stored.data


async def test_only_embeddings_need_workers_that_know_them(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    text, embedding = [
        await publish_first_task(bus, embedding) for embedding in (None, EmbeddingParams())
    ]
    assert tasks.decode(embedding, RenderBody)[0].header.version == 2
    monkeypatch.setattr(versions, "WIRE_VERSION", 1)
    assert tasks.decode(text, RenderBody)[0].header.version == 1
    with pytest.raises(
        UnsupportedVersion, match="version 2, and this worker reads versions 1 to 1"
    ):
        tasks.decode(embedding, RenderBody)

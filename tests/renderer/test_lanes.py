"""Media of the batch lane get the time that interactive requests leave."""

import operator
import os
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.protocol import subjects
from shared.protocol.multimodal import IMAGE, VIDEO
from shared.protocol.requests import ImagePart, ImageURL, Message, VideoPart, VideoURL
from tests.renderer.decoding import files
from tests.renderer.rig import config_for, new_model, publish, renderer, task_for
from tests.support.media import data_url, png
from tests.support.waiting import until
from workers.renderer.media.decoders import BATCH_NICENESS
from workers.renderer.processing.processor import Processor


def media_of(lane: str) -> list[ImagePart | VideoPart]:
    """Media that no other lane has, so that they are processed for it."""
    seed = subjects.LANES.index(lane)
    video = files.sequence([files.jpeg(files.picture(number + seed)) for number in range(4)])
    return [
        ImagePart(ImageURL(data_url(png(seed)))),
        VideoPart(VideoURL(video.decode())),
    ]


async def test_media_are_processed_at_the_priority_of_their_lane(
    broker: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    priorities: dict[tuple[str, str], int] = {}
    lane, process = "", Processor.process

    def note(self: Processor, *args: Any) -> Any:
        image = process(self, *args)
        # The niceness of this thread alone.
        priorities[lane, image.modality] = os.nice(0)
        return image

    model = new_model()
    async with renderer(broker.url, config_for(model)):
        monkeypatch.setattr(Processor, "process", note)
        for lane in subjects.LANES:
            task = task_for(bus, model, [Message("user", [*media_of(lane)])])
            await publish(bus, replace(task, header=replace(task.header, lane=lane)))
            await until(partial(operator.contains, priorities, (lane, VIDEO)))
    patient = min(19, os.nice(0) + BATCH_NICENESS)
    assert priorities == {
        ("interactive", IMAGE): os.nice(0),
        ("interactive", VIDEO): os.nice(0),
        ("batch", IMAGE): patient,
        ("batch", VIDEO): patient,
    }

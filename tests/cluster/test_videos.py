"""Videos through the whole of Pagemill: over NATS, over HTTP and from the command line.

The answers equal transformers' forward for the same weights, frames and positions.
"""

import asyncio
import base64
import io
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import Qwen2VLForConditionalGeneration

from ops.rendering import render
from shared.bus.bus import Bus
from shared.client import ask, new_request_id, pin_media, tokenize
from shared.codec.tensors import to_torch
from shared.config.schema import ModelConfig
from shared.models.frames import resize_frame
from shared.models.media import DecodedVideo, Frame, FramePlan, VideoProbe
from shared.models.registry import adapt
from shared.protocol import subjects
from shared.protocol.records import Failure, Finish, LogRecord
from shared.protocol.renderer_rpc import TokenizeRequest
from shared.protocol.requests import (
    SEQUENCE_HEAD,
    GenerateRequest,
    Message,
    TextPart,
    VideoPart,
    VideoURL,
)
from shared.protocol.sampling import SamplingParams
from tests.cluster.conftest import IMAGE_HOST, Cluster, kill, living, run, stopped
from tests.cluster.streams import assert_gapless, read_amid_signal, tokens_of
from tests.cluster.test_redelivery import wait_until_idle, wait_until_queued
from tests.renderer.canary import Canary, send
from tests.support.waiting import until
from workers.engine.core.sequence import EngineRequest, Item
from workers.renderer.processing.processor import Processor
from workers.settings import DEMO_MODEL

QUESTION = "Which way does the shape move?"
SAMPLING = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
FPS = 4


def frames_of(num: int, shift: int = 0) -> list[np.ndarray]:
    frames = []
    for i in range(num):
        frame = np.full((84, 112, 3), 255, np.uint8)
        left = (10 * i + shift) % 90
        frame[30:50, left : left + 20] = (255, 30 * i % 256, shift)
        frames.append(frame)
    return frames


@cache
def clip(num: int = 8, shift: int = 0) -> bytes:
    """Return a GIF with unchanged frames."""
    images = [Image.fromarray(frame) for frame in frames_of(num, shift)]
    file = io.BytesIO()
    images[0].save(file, "GIF", save_all=True, append_images=images[1:], duration=1000 // FPS)
    return file.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/gif;base64," + base64.b64encode(data).decode()


def question(video: VideoURL, text: str = QUESTION) -> GenerateRequest:
    return GenerateRequest("demo", [Message("user", [VideoPart(video), TextPart(text)])], SAMPLING)


def expected_tokens(frames: list[np.ndarray], video: VideoURL, is_sequence: bool) -> list[int]:
    """Return the greedy tokens of transformers' forward with the positions of the original rule."""
    model: Any = Qwen2VLForConditionalGeneration.from_pretrained(DEMO_MODEL).eval()
    processor = Processor(ModelConfig(str(DEMO_MODEL)))

    def read(plan: FramePlan) -> Iterator[Frame]:
        return (resize_frame(frames[index], plan) for index in plan.indexes)

    probe = VideoProbe(len(frames), 1.0 if is_sequence else FPS, 112, 84, is_sequence)
    messages = question(video).messages
    assert messages is not None
    rendered = render(processor, messages, [DecodedVideo(probe, read, "")])
    [item] = rendered.items
    fields = {name: to_torch(rendered.tensors[index]) for name, index in item.fields.items()}
    patches, table = fields["video_patches"], fields["pixel_table"]
    pixels = torch.stack([table[c][patches[:, c].long()] for c in range(3)], 1).flatten(1)
    items = [Item("video", "", item.placeholder, fields)]
    located = adapt(model).locate(EngineRequest("", rendered.prompt_token_ids, items, SAMPLING))
    assert located is not None
    token_ids = torch.tensor([rendered.prompt_token_ids])
    tokens: list[int] = []
    for _ in range(SAMPLING.max_tokens or 0):
        later = torch.arange(len(rendered.prompt_token_ids), token_ids.shape[1]) + located.delta
        positions = torch.cat([located.prompt, later.expand(3, -1)], dim=1)
        with torch.inference_mode():
            logits = model(
                input_ids=token_ids,
                position_ids=positions[:, None],
                pixel_values_videos=pixels,
                video_grid_thw=fields["video_grid_thw"][None],
            ).logits
        tokens.append(int(logits[0, -1].argmax()))
        token_ids = torch.cat([token_ids, torch.tensor([tokens[-1:]])], dim=1)
    return tokens


async def answer(bus: Bus, request: GenerateRequest) -> list[LogRecord]:
    return [record async for record in ask(bus, request, new_request_id())]


async def num_processed(bus: Bus) -> int:
    """Return the number of decoded items by the renderer's next heartbeat."""
    [renderer] = await living(bus, "renderer")
    subject, now_ms = subjects.heartbeat(renderer.worker), 1000 * time.time()

    async def is_new() -> bool:
        [beat] = await bus.read(subjects.WORKERS_STREAM, subject)
        return beat.stored_ms > now_ms

    await until(is_new)
    [renderer] = await living(bus, "renderer")
    return int(renderer.load["images_processed"])


@pytest.mark.parametrize("sampling", [{}, {"fps": 1.0}, {"num_frames": 6}, {"max_frames": 2}])
async def test_answers_are_those_of_transformers(client: Bus, sampling: dict[str, Any]) -> None:
    video = VideoURL(data_url(clip()), **sampling)
    records = await answer(client, question(video))
    assert_gapless(records)
    assert isinstance(records[-1], Finish)
    assert tokens_of(records) == expected_tokens(frames_of(8), video, is_sequence=False)


async def test_a_sequence_of_jpeg_files_is_a_video(client: Bus) -> None:
    files, frames = [], []
    for frame in frames_of(5):
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG")
        files.append(base64.b64encode(file.getvalue()))
        frames.append(np.asarray(Image.open(file)))
    video = VideoURL((SEQUENCE_HEAD + b",".join(files)).decode())
    expected = expected_tokens(frames, video, is_sequence=True)
    assert tokens_of(await answer(client, question(video))) == expected
    # As a stored file, it is the URL itself.
    stored = VideoURL(await pin_media(client, video.url.encode(), ""))
    assert tokens_of(await answer(client, question(stored))) == expected


async def test_every_way_to_send_a_video_gets_the_same_answer(
    client: Bus, cluster: Cluster, tmp_path: Path
) -> None:
    data = clip()
    text = "".join(
        choice.text
        for record in await answer(client, question(VideoURL(data_url(data))))
        for choice in getattr(record, "choices", [])
        if getattr(choice, "text", None)
    )
    [beat] = await living(client, "gateway")
    urls = [data_url(data), await pin_media(client, data, "")]
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for url in urls:
            content = [
                {"type": "video_url", "video_url": {"url": url}},
                {"type": "text", "text": QUESTION},
            ]
            body = {
                "model": "demo",
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 8,
                "ignore_eos": True,
                "temperature": 0,
            }
            reply = await http.post(f"{beat.url}/v1/chat/completions", json=body)
            assert reply.status_code == 200, reply.text
            assert reply.json()["choices"][0]["message"]["content"] == text
    file = tmp_path / "clip.gif"
    file.write_bytes(data)
    options = ["--max-tokens", "8", "--temperature", "0"]
    printed = await asyncio.to_thread(run, cluster, "ask", f"{QUESTION} @{file}", *options)
    assert text.startswith(printed.strip())


async def test_a_video_that_another_server_has_rendered_gets_the_same_answer(client: Bus) -> None:
    video = VideoURL(data_url(clip()))
    expected = tokens_of(await answer(client, question(video)))
    content = [
        {"type": "video_url", "video_url": {"url": video.url}},
        {"type": "text", "text": QUESTION},
    ]
    body = {"model": "demo", "messages": [{"role": "user", "content": content}]}
    [beat] = await living(client, "gateway")
    async with httpx.AsyncClient(trust_env=False, timeout=60, base_url=str(beat.url)) as http:
        rendered = (await http.post("/v1/chat/completions/render", json=body)).json()
        [placeholder] = rendered["features"]["mm_placeholders"]["video"]
        run = rendered["token_ids"][placeholder["offset"] :][: placeholder["length"]]
        assert len(run) == 24
        assert len(set(run)) == 1
        sampling = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = {**rendered, "sampling_params": sampling, "return_token_ids": True}
        reply = (await http.post("/inference/v1/generate", json=request)).json()
        assert reply["choices"][0]["token_ids"] == expected
        # The hash alone is enough from now on.
        del request["features"]["kwargs_data"], request["features"]["mm_metadata"]
        reply = (await http.post("/inference/v1/generate", json=request)).json()
        assert reply["choices"][0]["token_ids"] == expected


async def test_a_video_of_many_requests_is_decoded_once(client: Bus) -> None:
    before = await num_processed(client)
    video = VideoURL(data_url(clip(8, shift=3)))
    answers = await asyncio.gather(*(answer(client, question(video)) for _ in range(20)))
    assert len({tuple(tokens_of(records)) for records in answers}) == 1
    assert await num_processed(client) == before + 1


async def test_a_video_too_long_for_the_context_is_refused_by_its_tokens(client: Bus) -> None:
    tokenized = await tokenize(client, "demo", TokenizeRequest(prompt="red " * 100))
    text = "red " * (100 * (tokenized.max_model_len - 40) // tokenized.count)
    [failure] = await answer(client, question(VideoURL(data_url(clip(300))), text))
    assert isinstance(failure, Failure)
    assert failure.error.code == "context_length_exceeded"
    assert failure.error.field == "messages[0].content[0].video_url.url"
    assert "tokens are more than the" in failure.error.message


@pytest.mark.parametrize(
    ("video", "code"),
    [
        (VideoURL("data:;base64,AAAA"), ("invalid_media", "unsupported_content")),
        (VideoURL(data_url(clip()), fps=1.0, num_frames=2), ("invalid_request",)),
    ],
    ids=["no video", "both"],
)
async def test_faults_are_named(client: Bus, video: VideoURL, code: tuple[str, ...]) -> None:
    [failure] = await answer(client, question(video))
    assert isinstance(failure, Failure)
    assert failure.error.code in code
    assert failure.error.field == "messages[0].content[0].video_url.url"


async def test_too_many_videos_are_refused(client: Bus) -> None:
    # None of them can be decoded: they are counted before any is read.
    url, third = data_url(b"no video"), "messages[0].content[2].video_url.url"
    parts = [{"type": "video_url", "video_url": {"url": url}}] * 3
    body = {"model": "demo", "messages": [{"role": "user", "content": parts}]}
    [beat] = await living(client, "gateway")
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        reply = await http.post(f"{beat.url}/v1/chat/completions", json=body)
    error = reply.json()["error"]
    message = Message("user", [VideoPart(VideoURL(url))] * 3)
    [failure] = await answer(client, GenerateRequest("demo", [message], SAMPLING))
    assert isinstance(failure, Failure)
    assert reply.status_code == 422
    assert (error["code"], error["param"]) == ("media_too_large", third)
    assert (failure.error.code, failure.error.field) == ("media_too_large", third)
    limit = "videos in the request: 3, over the limit of 2 (max_videos)"
    assert error["message"] == failure.error.message == limit


# -- deaths ---------------------------------------------------------------------------------------


async def test_a_renderer_killed_after_a_video_costs_no_second_fetch(
    cluster: Cluster, client: Bus
) -> None:
    """Its frames are lost with it, before the engine has read them, and made again of the file."""
    canary = Canary(IMAGE_HOST)
    canary.answers["/clip.gif"] = send(clip(8, shift=7))
    video = VideoURL(canary.url("/clip.gif", IMAGE_HOST))
    renderer, engine = [await cluster.pid(client, role) for role in ("renderer", "engine")]
    await wait_until_idle(cluster.url, "engine")
    with stopped(engine):
        running = asyncio.create_task(answer(client, question(video)))
        await wait_until_queued(cluster.url, "engine", running)
        # The URL has another clip by now.
        canary.answers["/clip.gif"] = send(clip(8, shift=9))
        kill(renderer)
    records = await running
    canary.close()
    assert isinstance(records[-1], Finish)
    assert [hop.stage for hop in records[-1].path].count("renderer") == 2
    assert tokens_of(records) == expected_tokens(frames_of(8, shift=7), video, is_sequence=False)
    assert len(canary.paths) == 1


@pytest.mark.long
async def test_an_engine_killed_amid_an_answer_about_a_video(cluster: Cluster, client: Bus) -> None:
    request = question(VideoURL(data_url(clip(8, shift=11))))
    # The engine is killed at the first record, hundreds of steps before the end.
    sampling = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)
    request = GenerateRequest(request.model, request.messages, sampling)
    engine = await cluster.pid(client, "engine")
    records = await read_amid_signal(client, request, engine)
    assert len({record.attempt for record in records}) == 2
    assert tokens_of(records) == tokens_of(await answer(client, request))

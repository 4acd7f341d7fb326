"""Wan by real processes: killed after steps, over HTTP, and from the command line.

    request ──▶ dit ══▶ vae

In float64, the frames of each file are those of diffusers' own pipeline with the same noise, before
they are compressed.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from ops.browser import ENTER, MISSING, browsing
from shared import client
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.images import PaintParams
from shared.protocol.records import Finish, OutputEnd, StepState, VideoRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.videos import VideoParams
from shared.state import media_store
from shared.state.log_records import decode_record
from tests import preloaded
from tests.cluster.pages import choose
from tests.cluster.processes import Processes, running, until_nothing_is_left
from tests.generator.pipelines import wan
from tests.generator.pipelines.spec import to_file
from tests.support.slow_steps import slow_down
from tests.support.waiting import until
from workers.generator.diffusion.wan import Wan
from workers.generator.video_file import to_mp4

CONFIG = """
models:
  wan:
    path: wan
    dtype: float64
    stages: {dit: {sizes: [32x16, 16x32]}, vae: {}}
generator: {checkpoint_s: 0, threads: 1, result_ttl_s: 0}
gateway: {port: 0}
delivery: {ack_wait_s: 1.0, drain_s: 5.0, retry_delay_s: 0.1}
"""
WORKERS = {
    "coordinator": ["coordinator"],
    "dit": ["generator", "--model", "wan", "--stage", "dit"],
    "vae": ["generator", "--model", "wan", "--stage", "vae"],
    "gateway": ["gateway"],
}
STEP_S = 0.2
"""Minimum time of a step, so that a worker can be killed between two steps."""
PROMPT = "a red circle"
FORM = {"seed": 5, "steps": 3, "guidance": 3, "negative_prompt": "ugly", "frames": 5}


def register_roles() -> None:
    slow_down(Wan, "step", STEP_S)


@pytest.fixture(scope="module")
def processes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    folder = tmp_path_factory.mktemp("wan")
    (folder / "pagemill.yaml").write_text(CONFIG)
    wan.write(folder / "wan")
    with running(folder, WORKERS, __name__) as started:
        yield started


def file_of(prompt: str, params: PaintParams) -> bytes:
    """Return the file that the pipeline's frames would have."""
    assert params.fps is not None
    return to_mp4(to_file(wan.paint_whole(prompt, params)), params.fps)


def params_of(size: str = "32x16", frames: int = 5, fps: int = 16) -> PaintParams:
    return PaintParams(size, 1, 3, 3.0, "ugly", 5, frames=frames, fps=fps)


async def test_a_video_is_the_same_after_two_kills(processes: Processes, bus: Bus) -> None:
    options = VideoParams("32x16", 5, 8, 5, 3.0, "ugly", 5)
    request = GenerateRequest("wan", prompt=PROMPT, video=options, timeout_s=150.0)
    log = subjects.tokens("killed", "video")

    async def own() -> list[Any]:
        return [record async for record in client.ask(bus, request, "killed")]

    async def states() -> list[StepState]:
        stored = await bus.read(subjects.TOKENS_STREAM, log)
        records = (decode_record(message.data) for message in stored)
        return [record for record in records if isinstance(record, StepState)]

    async def has_step(number: int) -> bool:
        return any(state.step >= number for state in await states())

    making = asyncio.create_task(own())
    for number in (1, 3):
        await until(partial(has_step, number), 60)
        processes.kill("dit")
    (finish,) = await making
    assert isinstance(finish, Finish)
    assert [state.step for state in await states()] == [1, 2, 3, 4]
    assert len({state.attempt for state in await states()}) == 3
    # Only the last two states take space.
    stored = [await client.find_media(bus, state.state) for state in await states()]
    assert [data is None for data in stored] == [True, True, False, False]
    records = [record async for record in client.follow_output(bus, "killed", "video")]
    *_, video, end = records
    assert isinstance(video, VideoRecord)
    assert isinstance(end, OutputEnd)
    assert end.summary.units == {"frames": 5, "steps": 5, "prompt_tokens": 13}
    assert (video.width, video.height, video.frames, video.fps, video.seed) == (32, 16, 5, 8, 5)
    params = PaintParams("32x16", 1, 5, 3.0, "ugly", 5, frames=5, fps=8)
    assert await client.read_media(bus, video.media) == file_of(PROMPT, params)
    await until_nothing_is_left(bus)


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_the_client_of_openai_makes_lists_reads_and_deletes_videos(
    api: AsyncOpenAI, bus: Bus
) -> None:
    form = FORM | {"size": "32x16", "seconds": "0", "frames": 1}
    first = await api.videos.create(model="wan", prompt=PROMPT, extra_body=form)
    assert first.status in ("queued", "in_progress")
    assert (first.progress, first.seconds) == (0, "0")
    second = await api.videos.create_and_poll(
        model="wan", prompt=PROMPT, poll_interval_ms=100, extra_body=FORM
    )
    assert (second.status, second.progress, second.prompt) == ("completed", 100, PROMPT)
    assert (second.size, second.seconds, second.error) == ("32x16", "0.25", None)
    assert second.completed_at is not None
    assert second.expires_at is not None
    assert second.created_at <= second.completed_at < second.expires_at
    file = file_of(PROMPT, params_of())
    assert (await api.videos.download_content(second.id)).content == file
    part = await api.videos.with_raw_response.download_content(
        second.id, extra_headers={"Range": "bytes=100-199"}
    )
    assert (part.status_code, part.content) == (206, file[100:200])
    assert part.headers["content-range"] == f"bytes 100-199/{len(file)}"
    page = await api.videos.list(limit=1)
    assert [video.id for video in page.data] == [second.id]
    assert page.has_more
    assert [video.id async for video in page] == [second.id, first.id]
    assert [video.id async for video in api.videos.list(order="asc")] == [first.id, second.id]
    assert (await api.videos.delete(first.id)).deleted
    assert [video.id async for video in api.videos.list()] == [second.id]
    for call in (api.videos.retrieve, api.videos.delete, api.videos.download_content):
        with pytest.raises(openai.NotFoundError):
            await call(first.id)
    # An equal video has the same file, which stays until the last of them is deleted.
    third = await api.videos.create_and_poll(
        model="wan", prompt=PROMPT, poll_interval_ms=100, extra_body=FORM
    )
    name = await media_store.hash_media(file)
    await api.videos.delete(third.id)
    assert (await api.videos.download_content(second.id)).content == file
    await api.videos.delete(second.id)
    assert await media_store.look_up(bus, name, "") is None


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_a_video_shows_its_progress_until_it_is_deleted(
    processes: Processes, api: AsyncOpenAI, bus: Bus
) -> None:
    video = await api.videos.create(model="wan", prompt=PROMPT, extra_body=FORM | {"steps": 100})

    async def progress() -> int:
        return (await api.videos.retrieve(video.id)).progress

    await until(progress, 60)
    assert (await api.videos.retrieve(video.id)).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not complete: it is in_progress"):
        await api.videos.download_content(video.id)
    await api.videos.delete(video.id)
    await until_nothing_is_left(bus)


@pytest.mark.skipif(
    MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
)
async def test_the_page_shows_a_video(url: str, tmp_path: Path) -> None:
    shown = await asyncio.to_thread(film_on_page, url, tmp_path)
    assert shown == file_of(PROMPT, params_of())


def film_on_page(url: str, folder: Path) -> bytes:
    """Make a video on the page, after a wrong length. Return its file."""
    with browsing(folder) as page:
        page.open(f"{url}/")
        page.wait("!document.querySelector('#send').disabled")
        choose(page, "wan")
        values = {"seed": 5, "steps": 3, "guidance": 3, "negative_prompt": "ugly", "seconds": 60}
        for name, value in values.items():
            page.type(f"#paint-{name}", str(value))
        page.type("#question", PROMPT + ENTER)
        page.wait(
            "document.querySelector('#fault-paint-seconds')?.innerText.includes('limit of 161')"
        )
        (refused,) = page.console_errors()
        assert "400" in refused
        page.run("document.querySelector('#paint-seconds').value = '0.25'")
        page.run("document.querySelector('.turn:last-child .retry').click()")
        page.wait("document.querySelector('.turn:last-child progress')?.value > 0", timeout_s=60)
        assert "%" in page.text(".turn:last-child .status")
        video = "document.querySelector('.turn:last-child video.painted')"
        page.wait(f"{video}?.controls && {video}.readyState > 1", timeout_s=60)
        assert page.run("return document.querySelector('.turn progress')") is None
        assert page.run(f"return [{video}.videoWidth, {video}.videoHeight]") == [32, 16]
        assert page.console_errors() == []
        # The page loads the video again after a reload.
        page.run("location.reload()")
        page.wait(f"{video}?.readyState > 1", timeout_s=60)
        read = """
          const id = document.querySelector(".turn:last-child .request").textContent;
          return fetch(`v1/videos/${id}/content`)
            .then((file) => file.arrayBuffer())
            .then((bytes) => Array.from(new Uint8Array(bytes)));
        """
        return bytes(page.run(read))


@pytest.mark.filterwarnings("ignore:The Sora API:DeprecationWarning")
async def test_a_video_that_fails_has_its_error(api: AsyncOpenAI) -> None:
    video = await api.videos.create_and_poll(
        model="wan", prompt=PROMPT, poll_interval_ms=100, extra_body={"negative_prompt": "a" * 600}
    )
    assert video.status == "failed"
    assert video.error is not None
    assert (video.error.code, video.error.param) == ("context_length_exceeded", "negative_prompt")
    with pytest.raises(openai.BadRequestError, match="over the model's limit of 512"):
        await api.videos.download_content(video.id)


@pytest.mark.parametrize(
    ("changed", "field", "message"),
    [
        ({"size": "64x64"}, "size", "'64x64' is not available; available: 32x16, 16x32"),
        ({"frames": 6}, "frames", "1 frame more than a multiple of 4, such as 5 or 9, not 6"),
        ({"frames": 165}, "frames", "165 frames are over the model's limit of 161"),
        ({"seconds": "12"}, "seconds", "193 frames are over the model's limit of 161"),
        ({"seconds": "4", "frames": 5}, "frames", "5 contradicts seconds, which are 65 frames"),
        ({"seconds": "long"}, "seconds", "such as 4 or 2.5"),
        ({"fps": 61}, "fps", "at most 60"),
        ({"input_reference": {"image_url": "x"}}, "input_reference", "not supported"),
        ({"prompt": ""}, "prompt", "at least 1"),
        ({"timeout_s": 5000}, "timeout_s", "over the limit of 3000"),
    ],
)
async def test_what_cannot_be_made_is_refused_by_the_field(
    api: AsyncOpenAI, changed: dict[str, Any], field: str, message: str
) -> None:
    body = {"model": "wan", "prompt": PROMPT} | changed
    with pytest.raises(openai.BadRequestError) as refused:
        await api.post("/videos", cast_to=object, body=body)
    answer: Any = refused.value.body
    assert answer["param"] == field
    assert message in answer["message"]


async def test_the_command_line_saves_a_video(processes: Processes, tmp_path: Path) -> None:
    options = ["--config", str(processes.folder / "pagemill.yaml"), "--nats", processes.url]
    form = ["--steps", "3", "--seed", "5", "--guidance", "3", "--negative", "ugly"]
    file = tmp_path / "out.mp4"
    length = ["--frames", "5", "--fps", "24"]
    saved = await asyncio.to_thread(
        preloaded.run, "draw", PROMPT, "-o", str(file), *form, *length, *options
    )
    assert saved.returncode == 0, saved.stderr
    assert "32 x 16 pixels, 5 frames at 24 per second, seed 5" in saved.stderr
    assert file.read_bytes() == file_of(PROMPT, params_of(fps=24))

"""The command `pagemill draw`, which saves images or a video."""

from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from cyclopts import Parameter

from shared import client
from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.helpers.validation import invalid_request
from shared.protocol.images import ImageParams
from shared.protocol.multimodal import IMAGE
from shared.protocol.pipeline import VIDEO_KIND, OutputSpec
from shared.protocol.records import Finish, ImageRecord, LogRecord, OutputRecord, VideoRecord
from shared.protocol.requests import GenerateRequest
from shared.protocol.videos import VideoParams
from shared.stage.pipelines import pipelines_of
from workers import settings
from workers.cli.ask import print_answer
from workers.cli.broker import connected
from workers.cli.inputs import Medium, read_text
from workers.cli.options import ConfigFile, ModelName, NatsUrl, NewId, load, only_model
from workers.cli.outputs import check_output, free_path, numbered, write_file
from workers.cli.terminal import print_note

FIELDS = ("size", "n", "steps", "guidance", "negative_prompt", "seed", "frames", "fps")
Params = TypeVar("Params", ImageParams, VideoParams)


async def draw(
    prompt: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    size: str | None = None,
    n: int | None = None,
    seed: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    negative: str | None = None,
    frames: int | None = None,
    fps: int | None = None,
    model: ModelName = None,
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None,
    json: bool = False,
    request_id: NewId = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Generate or edit images, or make a video, by a text. Ctrl-C cancels the request.

    Parameters
    ----------
    prompt
        Description of the images, or of the change; @FILE in it adds an image to edit, or the text
        of a file, and - alone is the text of stdin.
    output
        The file, by default image.png or video.mp4, or with a number if it exists. Numbers follow
        the names of several images.
    size
        Width and height in pixels, such as 120x120; by default as the model decides.
    n
        Number of images; not for a video.
    seed
        Seed of the noise from which the images are made; by default a random one.
    steps
        Denoising steps of each image; by default as configured.
    guidance
        Scale of the guidance by the prompt, 1 or 0 for none; by default as configured.
    negative
        Description of what the images must not show.
    frames
        Number of frames of a video; by default as the model was trained.
    fps
        Frames per second of a video; by default as the model was trained.
    timeout_s
        Maximum seconds from acceptance to the last image; by default as configured.
    json
        Print the records of the request's own log, one JSON object per line.
    request_id
        Id of the request; with the id of an earlier request, the command saves its images.
    """
    loaded = load(config)
    text, images = read_text(prompt, IMAGE)
    values = (size, n, steps, guidance, negative, seed, frames, fps)
    async with connected(settings.login_of(loaded, given_url=nats), "draw") as bus:
        request = await _request_of(bus, loaded, model, text, values, images, timeout_s)
        return await _answer(bus, request, request_id, output, as_json=json)


async def _request_of(
    bus: Bus,
    config: Config,
    model: str | None,
    prompt: str,
    values: Sequence[Any],
    images: Sequence[Medium],
    timeout_s: float | None,
) -> GenerateRequest:
    """Return the request for images or a video, with `values` in the order of FIELDS.

    Images to edit are stored. Raises InvalidRequest.
    """
    fields = {name: value for name, value in zip(FIELDS, values, strict=True) if value is not None}
    makes_video = not fields.keys().isdisjoint(("frames", "fps"))
    model, output = find_painter(config, model, edits=bool(images), makes_video=makes_video)
    if images:
        fields["input_images"] = [await client.pin_media(bus, image.data) for image in images]
    is_video = output.kind == VIDEO_KIND
    return GenerateRequest(
        model,
        prompt=prompt,
        image=None if is_video else _params(fields, ImageParams),
        video=_params(fields, VideoParams) if is_video else None,
        outputs=[output.name],
        timeout_s=timeout_s,
    )


def _params(values: Mapping[str, Any], kind: type[Params]) -> Params:
    """Return the parameters with these values. Raises InvalidRequest."""
    try:
        return msgspec.convert(values, kind)
    except msgspec.ValidationError as error:
        raise invalid_request(error, kind) from error


def find_painter(
    config: Config, model: str | None, *, edits: bool = False, makes_video: bool = False
) -> tuple[str, OutputSpec]:
    """Return a model and its output of images or videos.

    By default it is the only model that edits images, that makes videos, or that paints a text;
    models of images come before models of videos. Raises InvalidRequest if there is none, or
    several.
    """
    stages = {
        name: stage
        for name, pipeline in pipelines_of(config).items()
        if (stage := pipeline.painter or pipeline.video_maker) is not None
    }
    if model is None:
        able = [
            name
            for name, stage in stages.items()
            if (stage.input_images > 0) == edits and (stage.video is not None or not makes_video)
        ]
        does = "edit images" if edits else "make videos" if makes_video else "paint a text"
        model = only_model([name for name in able if stages[name].video is None] or able, does)
    if model not in stages:
        raise InvalidRequest(
            f"{model} has no output of images or videos; see `pagemill check`", field="model"
        )
    output = stages[model].output
    assert output is not None
    return model, output


async def _answer(
    bus: Bus, request: GenerateRequest, request_id: str | None, file: Path | None, *, as_json: bool
) -> int:
    """Send a request, print its records, and save its files. Raises InvalidRequest."""
    if file is None:
        count = (request.image.n if request.image is not None else None) or 1
        file = free_path(Path("image.png" if request.video is None else "video.mp4"), count)
    check_output(file)
    request_id = request_id or client.new_request_id()
    records = client.ask(bus, request, request_id)
    saved = _while_saving(bus, records, request_id, request.outputs[0], file)
    return await print_answer(bus, request_id, saved, as_json=as_json, output=file)


async def _while_saving(
    bus: Bus, records: AsyncIterator[LogRecord], request_id: str, output: str, file: Path
) -> AsyncGenerator[LogRecord, None]:
    """Yield the records of a request, and write its files if it ends without an error."""
    async for record in records:
        yield record
        if isinstance(record, Finish):
            await save_images(bus, client.follow_output(bus, request_id, output), file)


async def save_images(bus: Bus, output: AsyncIterator[OutputRecord], file: Path) -> None:
    """Write the images or the video of an output. Raises InvalidRequest, DiskFull, Unavailable."""
    records = [record async for record in output]
    images = [record for record in records if isinstance(record, ImageRecord)]
    images.sort(key=lambda image: image.number)
    for image, png in zip(images, numbered(file, len(images)), strict=True):
        write_file(png, await client.read_media(bus, image.media))
        print_note(f"{png}: {image.width} x {image.height} pixels, seed {image.seed}")
    for video in records:
        if isinstance(video, VideoRecord):
            write_file(file, await client.read_media(bus, video.media))
            length = f"{video.frames} frames at {video.fps} per second, seed {video.seed}"
            print_note(f"{file}: {video.width} x {video.height} pixels, {length}")

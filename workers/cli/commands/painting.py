"""The command `pagemill draw`."""

from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import Parameter

from shared import client
from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.helpers.validation import invalid_request
from shared.protocol.images import ImageParams
from shared.protocol.multimodal import IMAGE
from shared.protocol.records import Finish, ImageRecord, LogRecord
from shared.protocol.requests import GenerateRequest
from shared.stage.pipelines import pipeline_of
from workers import settings
from workers.cli.ask import check_output, print_answer, read_media
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, ModelName, NatsUrl, NewId, load
from workers.cli.terminal import print_note


async def draw(
    prompt: str,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])] = Path("image.png"),
    image: list[Path] | None = None,
    size: str | None = None,
    n: int | None = None,
    seed: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    negative: str | None = None,
    model: ModelName = None,
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None,
    json: bool = False,
    request_id: NewId = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Generate or edit images by a text, and write PNG files. Ctrl-C cancels the request.

    Parameters
    ----------
    prompt
        Description of the images, or of the change.
    output
        The PNG file. With several images, their numbers are appended to its name.
    image
        File of an image to edit. May be given several times.
    size
        Width and height in pixels, such as 120x120; by default as the model decides.
    n
        Number of images.
    seed
        Seed of the noise from which the images are made; by default a random one.
    steps
        Denoising steps of each image; by default as configured.
    guidance
        Scale of the guidance by the prompt, 1 or 0 for none; by default as configured.
    negative
        Description of what the images must not show.
    timeout_s
        Maximum seconds from acceptance to the last image; by default as configured.
    json
        Print the records of the request's own log, one JSON object per line.
    request_id
        Id of the request; with the id of an earlier request, the command saves its images.
    """
    loaded = load(config)
    model, name = _find_painter(loaded, model)
    check_output(output)
    params = _params(size, n, steps, guidance, negative, seed)
    request_id = request_id or client.new_request_id()
    async with connected(settings.login_of(loaded, given_url=nats), "draw") as bus:
        params = await _with_images(bus, params, image or [])
        request = GenerateRequest(
            model, prompt=prompt, image=params, outputs=[name], timeout_s=timeout_s
        )
        saved = _while_saving(bus, client.ask(bus, request, request_id), request_id, name, output)
        return await print_answer(bus, request_id, saved, as_json=json, has_text=False)


def _params(*values: Any) -> ImageParams:
    """Return parameters from values in the order of ImageParams. Raises InvalidRequest."""
    fields = dict(zip(ImageParams.__struct_fields__, values, strict=False))
    try:
        return msgspec.convert(fields, ImageParams)
    except msgspec.ValidationError as error:
        raise invalid_request(error) from error


async def _with_images(bus: Bus, params: ImageParams, files: Sequence[Path]) -> ImageParams:
    """Store the files of images to edit, and return parameters with their URLs."""
    images = [await client.pin_media(bus, read_media(file, IMAGE)) for file in files]
    return msgspec.structs.replace(params, input_images=tuple(images))


def _find_painter(config: Config, model: str | None) -> tuple[str, str]:
    """Return a model that paints, by default the first one, and the name of its image output.

    Raises InvalidRequest if there is none.
    """
    for name in config.models if model is None else [model]:
        painter = pipeline_of(config.models[name]).painter if name in config.models else None
        if painter is not None and painter.output is not None:
            return name, painter.output.name
    owner = "no configured model" if model is None else model
    raise InvalidRequest(f"{owner} has no output of images; see `pagemill check`", field="model")


async def _while_saving(
    bus: Bus, records: AsyncIterator[LogRecord], request_id: str, output: str, file: Path
) -> AsyncIterator[LogRecord]:
    """Yield the records of a request, and write its images to files if it ends without an error."""
    async for record in records:
        yield record
        if isinstance(record, Finish):
            await _save(bus, request_id, output, file)


async def _save(bus: Bus, request_id: str, output: str, file: Path) -> None:
    images = [
        record
        async for record in client.follow_output(bus, request_id, output)
        if isinstance(record, ImageRecord)
    ]
    for image in sorted(images, key=lambda image: image.number):
        numbered = file.with_stem(f"{file.stem}-{image.number + 1}") if len(images) > 1 else file
        data = await client.read_media(bus, image.media)
        try:
            numbered.write_bytes(data)
        except OSError as error:
            raise InvalidRequest(f"{numbered}: {error.strerror}", field="output") from error
        print_note(f"{numbered}: {image.width} x {image.height} pixels, seed {image.seed}")

"""Commands that need a renderer and no engine: `pagemill render` and `pagemill tokenize`."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any

from shared import client
from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.errors import PagemillError, Unavailable, UnknownModel
from shared.protocol.records import error_info
from shared.protocol.renderer_rpc import RenderedPrompt, TokenizeRequest
from shared.stage.pipelines import RENDERER
from workers.cli.ask import build_request, media_parts, print_error, with_media
from workers.cli.broker import connected_to_writer
from workers.cli.inputs import read_input, read_text
from workers.cli.options import ConfigFile, Json, ModelName, NatsUrl
from workers.cli.terminal import print_json, print_line


async def render(
    question: str,
    /,
    *,
    model: ModelName = None,
    json: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print an engine's input for a question: token ids, and each image's position and tensors.

    Parameters
    ----------
    question
        The text of the question, and @FILE for files, as for `pagemill ask`.
    json
        Print one JSON object, which includes the token ids.
    """
    text, media = read_input(question)
    try:
        async with connected_to_writer(config, nats, model, "render") as (bus, name):
            request = build_request(name, text, [])
            request = with_media(request, await media_parts(bus, media))
            async with _unserved_named(bus, name):
                rendered, tensors = await client.render(bus, request)
    except PagemillError as error:
        return _print_reported(error, [medium.name for medium in media], as_json=json)
    if json:
        print_json(_describe(rendered, tensors))
        return 0
    print_line(f"{len(rendered.prompt_token_ids)} tokens")
    for item in rendered.items:
        offset, length = item.placeholder.offset, item.placeholder.length
        print_line(f"{item.modality} {item.mm_hash}: tokens {offset} to {offset + length - 1}")
        for name, index in item.fields.items():
            print_line(f"  {name:<16} {tensors[index].dtype} {list(tensors[index].shape)}")
    return 0


async def tokenize(
    text: str,
    /,
    *,
    model: ModelName = None,
    json: Json = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the tokens of a text, without the model's chat template.

    Parameters
    ----------
    text
        The text to tokenize; @FILE in it is the text of a file, and - is the text of stdin.
    """
    text, _ = read_text(text)
    try:
        async with (
            connected_to_writer(config, nats, model, "tokenize") as (bus, name),
            _unserved_named(bus, name),
        ):
            answer = await client.tokenize(bus, name, TokenizeRequest(prompt=text))
    except PagemillError as error:
        return _print_reported(error, as_json=json)
    if json:
        print_json(answer)
    else:
        print_line(f"{answer.count} tokens of at most {answer.max_model_len}")
        print_line(" ".join(map(str, answer.token_ids)))
    return 0


@contextlib.asynccontextmanager
async def _unserved_named(bus: Bus, model: str) -> AsyncIterator[None]:
    """Raise UnknownModel instead of Unavailable, if renderers serve other models."""
    try:
        yield
    except Unavailable:
        beats = [beat for beat in await bus.heartbeats.read() if beat.role == RENDERER]
        served = {name for beat in beats for name in beat.models}
        if served and model not in served:
            names = ", ".join(sorted(served))
            raise UnknownModel(f"no model {model!r}; served: {names}", field="model") from None
        raise


def _describe(rendered: RenderedPrompt, tensors: Sequence[TensorData]) -> dict[str, Any]:
    """Return a JSON object for a prompt, with the dtypes and shapes of its tensors."""
    return {
        "prompt_token_ids": rendered.prompt_token_ids,
        "items": [
            {
                "modality": item.modality,
                "mm_hash": item.mm_hash,
                "offset": item.placeholder.offset,
                "length": item.placeholder.length,
                "fields": {
                    name: {"dtype": tensors[index].dtype, "shape": tensors[index].shape}
                    for name, index in item.fields.items()
                },
            }
            for item in rendered.items
        ],
    }


def _print_reported(error: PagemillError, files: Sequence[str] = (), *, as_json: bool) -> int:
    """Print an error that a renderer has reported, and return the exit code. Raises all others.

    `files` is as in `print_error`.
    """
    if not error.reported:
        raise error
    info = error_info(error)
    print_json({"type": "error", "error": info}) if as_json else print_error(info, files)
    return 1

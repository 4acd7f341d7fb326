"""The command `pagemill say`."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from shared import client
from shared.protocol.requests import GenerateRequest
from workers import settings
from workers.cli.ask import print_answer
from workers.cli.broker import connected
from workers.cli.inputs import read_text
from workers.cli.options import ConfigFile, ModelName, NatsUrl, NewId, load
from workers.cli.outputs import SPEECH_FILE, NewFile, free_path
from workers.cli.sound import find_audio, while_saving


async def say(
    text: str,
    /,
    *,
    output: Annotated[Path | None, Parameter(name=["--output", "-o"])] = None,
    voice: str | None = None,
    model: ModelName = None,
    timeout_s: Annotated[float | None, Parameter(name="--timeout")] = None,
    json: bool = False,
    request_id: NewId = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Speak a given text, and write the sound to a WAV file. Ctrl-C cancels the request.

    Parameters
    ----------
    text
        The text to speak; @FILE in it is the text of a file, and - is the text of stdin.
    output
        The WAV file; by default speech.wav, or with a number if it exists.
    voice
        Name of one of the model's voices; by default the first one.
    timeout_s
        Maximum seconds from acceptance to the end of the speech; by default as configured.
    json
        Print the records of the request's own log, one JSON object per line.
    request_id
        Id of the request; with the id of an earlier request, the command saves its sound.
    """
    loaded = load(config)
    text, _ = read_text(text)
    model, audio = find_audio(loaded, model, text_given=True)
    request = GenerateRequest(
        model, given_text=text, voice=voice, outputs=[audio], timeout_s=timeout_s
    )
    request_id = request_id or client.new_request_id()
    with NewFile(output or free_path(SPEECH_FILE)) as file:
        async with connected(settings.login_of(loaded, given_url=nats), "say") as bus:
            records = client.ask(bus, request, request_id)
            saved = while_saving(bus, records, request_id, audio, file)
            return await print_answer(bus, request_id, saved, as_json=json, output=output)

"""Writes the sound of a request to a file."""

import asyncio
import base64
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path

from shared import client
from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.protocol.pipeline import AUDIO, TEXT
from shared.protocol.records import AudioChunk, Finish, LogRecord
from shared.stage.pipelines import pipelines_of
from workers.cli.options import only_model
from workers.cli.outputs import NewFile, writing
from workers.cli.terminal import print_note
from workers.gateway.core.sound_formats import wav_header


def find_audio(config: Config, model: str | None, *, text_given: bool = False) -> tuple[str, str]:
    """Return the model, by default the only one that speaks, and the name of its sound output.

    With `text_given`, the output is made from a text of the request, and otherwise with the text
    of the model. Raises InvalidRequest.
    """
    outputs: dict[str, str] = {}
    for name, pipeline in pipelines_of(config).items():
        part = pipeline.with_text_given if text_given else pipeline
        output = part.output_of(AUDIO)
        if output is not None and (text_given or TEXT in part.outputs):
            outputs[name] = output.name
    model = model or only_model(outputs, "speak")
    if model not in outputs:
        raise InvalidRequest(f"{model} has no output of sound; see `pagemill check`", field="model")
    return model, outputs[model]


async def while_saving(
    bus: Bus, records: AsyncIterator[LogRecord], request_id: str, output: str, file: NewFile
) -> AsyncGenerator[LogRecord, None]:
    """Yield the records of a request, and write its sound to a WAV file as it is received.

    The file is kept if the request ends without an error.
    """
    saving = asyncio.create_task(_save(bus, request_id, output, file))
    try:
        async for record in records:
            yield record
            if isinstance(record, Finish):
                if seconds := await saving:
                    file.keep()
                print_note(f"{file.path}: {seconds:.1f} s of sound")
                error = record.outputs[output].error
                if error is not None:
                    print_note(f"the speech is cut: {error.message}")
                elif any(summary.finish_reason == "length" for summary in record.outputs.values()):
                    print_note("the speech is cut: it reached the limit of its stage")
    finally:
        saving.cancel()
        await asyncio.gather(saving, return_exceptions=True)


async def save_sound(bus: Bus, request_id: str, output: str, path: Path) -> None:
    """Write the sound of a request to a WAV file, and print its length."""
    with NewFile(path) as file:
        if seconds := await _save(bus, request_id, output, file):
            file.keep()
        print_note(f"{path}: {seconds:.1f} s of sound")


async def _save(bus: Bus, request_id: str, output: str, file: NewFile) -> float:
    """Write the sound, and return its duration in seconds."""
    num_samples, sample_rate, stream = 0, 1, file.stream
    with writing(file.path):
        async for record in client.follow_output(bus, request_id, output):
            if not isinstance(record, AudioChunk):
                continue
            if not num_samples:
                stream.write(wav_header(record.sample_rate))
            stream.write(base64.b64decode(record.pcm))
            stream.flush()
            num_samples, sample_rate = num_samples + record.num_samples, record.sample_rate
        if num_samples and stream.seekable():
            stream.seek(0)
            stream.write(wav_header(sample_rate, 2 * num_samples))
    return num_samples / sample_rate

"""Form, response bodies and events of OpenAI's transcriptions. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

from shared.helpers import patterns

UNSUPPORTED = frozenset(
    {"chunking_strategy", "include", "timestamp_granularities", "known_speaker_names"}
    | {"known_speaker_references", "translate"}
)
UNSUPPORTED_FORMATS = {
    "verbose_json": "the model does not produce timestamps",
    "srt": "the model does not produce timestamps",
    "vtt": "the model does not produce timestamps",
    "diarized_json": "the model does not distinguish speakers",
}
"""Formats of other servers, with the reason why they are not supported."""


class TranscriptionForm(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Fields of the form, except for `file`, which is the recording."""

    model: str
    language: Annotated[str, Meta(pattern=patterns.LANGUAGE)] | None = None
    """ISO 639 code of the spoken language, such as `en`; by default the model detects it."""
    prompt: Annotated[str, Meta(max_length=4096)] | None = None
    """Further instructions to the model, such as the spelling of names; for Whisper, the text
    before the recording."""
    response_format: str = "json"
    """`json`, or `text` for the text alone."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    stream: bool | None = None
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the end: by default `delivery.default_timeout_s`, at most
    `delivery.max_timeout_s`."""
    durable: bool | None = None
    """Continue the transcription when the connection closes."""
    user: str | None = None
    """No effect."""


class StoredTranscription(TranscriptionForm, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Transcription of a stored file, as JSON."""

    file: str
    """Id or `media:` URL of the recording, a file of `/v1/files`."""


class TranscriptionUsage(Struct, frozen=True):
    input_tokens: int
    output_tokens: int
    total_tokens: int
    type: Literal["tokens"] = "tokens"


class Transcription(Struct, frozen=True):
    text: str
    usage: TranscriptionUsage


class TranscriptDelta(Struct, frozen=True):
    delta: str
    type: str = "transcript.text.delta"


class TranscriptDone(Struct, frozen=True):
    text: str
    usage: TranscriptionUsage
    type: str = "transcript.text.done"

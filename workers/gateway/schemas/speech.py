"""Request and response bodies of OpenAI's speech, and the list of voices. Pure."""

from typing import Annotated, Literal

from msgspec import Meta, Struct

UNSUPPORTED = frozenset({"instructions", "speed"})


class SpeechRequest(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str
    input: Annotated[str, Meta(min_length=1, max_length=4096)]
    """The text to speak."""
    voice: str | None = None
    """By default the model's first voice."""
    response_format: str = "wav"
    """`wav`, or `pcm` for 16-bit samples alone, least significant byte first."""
    stream_format: str | None = None
    """`audio`, the default: the bytes of the sound as they are made. `sse`: events."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Seconds from acceptance to the end of the speech: by default `delivery.default_timeout_s`, at
    most `delivery.max_timeout_s`."""
    durable: bool | None = None
    """Continue the speech when the connection closes."""

    # Other values of these fields would have an effect that is not implemented.
    instructions: Literal[""] | None = None
    speed: Annotated[float, Meta(ge=1, le=1)] | None = None

    user: str | None = None
    """No effect."""


class SpeechUsage(Struct, frozen=True):
    input_tokens: int
    """Tokens of the text, counted by the stage that speaks."""
    output_tokens: int
    """Codec frames."""
    total_tokens: int


class SpeechDelta(Struct, frozen=True):
    audio: str
    """Base64 of the next bytes."""
    type: str = "speech.audio.delta"


class SpeechDone(Struct, frozen=True):
    usage: SpeechUsage
    type: str = "speech.audio.done"


class SpeechResult(Struct, frozen=True):
    """A complete speech, as the result in the state of its request."""

    id: str
    created: int
    model: str
    usage: SpeechUsage
    url: str
    """Path of the sound on this server."""
    object: str = "audio.speech"


class VoiceEntry(Struct, frozen=True):
    id: str
    model: str
    object: str = "voice"


class VoiceList(Struct, frozen=True):
    data: list[VoiceEntry]
    object: str = "list"

"""Request bodies of OpenAI's speech, and the list of voices. Pure."""

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
    """`audio`: the bytes of the sound as they are made, as without this field."""
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Time from acceptance to the end of the speech. The configured value is the default and
    maximum."""

    # Only values without an effect.
    instructions: Literal[""] | None = None
    speed: Annotated[float, Meta(ge=1, le=1)] | None = None

    user: str | None = None
    """No effect."""


class VoiceEntry(Struct, frozen=True):
    id: str
    model: str
    object: str = "voice"


class VoiceList(Struct, frozen=True):
    data: list[VoiceEntry]
    object: str = "list"

"""Digests: a repeated request has the same one, and a different request another."""

import pytest
from msgspec.structs import replace

from shared.protocol.images import ImageParams
from shared.protocol.requests import (
    EmbeddingParams,
    GenerateRequest,
    ImagePart,
    ImageURL,
    Message,
    TextPart,
)
from workers.gateway.backend.submit import _digest
from workers.gateway.core.plan import SubmitPlan, UsageOptions
from workers.gateway.openai.chat import AudioOptions
from workers.gateway.openai.speech import SpeechOptions

IMAGE = ImagePart(ImageURL("media:" + "0" * 64))
CHAT = GenerateRequest(
    "demo", messages=[Message("user", [TextPart("Hi"), IMAGE])], timeout_s=3.0, voice="a"
)
EMBEDDING = GenerateRequest("demo", prompt="Hi", embedding=EmbeddingParams(dimensions=2))


class Options(UsageOptions, frozen=True, kw_only=True):
    n: int = 1


PLAN = SubmitPlan([CHAT, EMBEDDING], {"temperature": 0.5}, Options(include_usage=True))
# Recorded since requests have tenant and id in their subject. Later fields must not change it.
BEFORE = "a84ae056ccce128310f33b4b3a9126994040c5ddd57fe7f2f85b0c7844636236"


def test_gateways_without_newer_fields_make_the_same_digest() -> None:
    assert _digest(PLAN.requests, PLAN) == BEFORE


def test_what_is_configured_is_no_part_of_a_digest() -> None:
    def digest(format: str, stored_s: int, *, timed: bool) -> str:
        speech = AudioOptions(output="audio", format=format, stored_s=stored_s, timed=timed)
        return _digest(PLAN.requests, replace(PLAN, options=SpeechOptions(speech=speech)))

    wav = digest("wav", 60, timed=False)
    assert digest("wav", 3600, timed=True) == wav
    assert digest("pcm", 60, timed=False) != wav


@pytest.mark.parametrize(
    "changed",
    [
        replace(CHAT, on_late="text"),
        replace(CHAT, image=ImageParams(n=2)),
        replace(CHAT, voice="b"),
        replace(CHAT, messages=[Message("user", "Hi")]),
    ],
)
def test_other_content_has_another_digest(changed: GenerateRequest) -> None:
    assert _digest([changed, EMBEDDING], PLAN) != BEFORE

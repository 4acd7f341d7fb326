"""Requests of the OpenAI API become requests on the bus."""

from typing import Any

import msgspec
import pytest

from shared.protocol.requests import VideoPart
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.openai.chat import MAX_NAMED_FILES, plan_chat
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import plan_completion
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest


def plan(**fields: Any) -> list[SubmitPlan[Any]]:
    """Plans of a chat completion and of a completion with the same fields."""
    messages = [{"role": "user", "content": "x"}]
    chat = msgspec.convert({"model": "m", "messages": messages} | fields, ChatRequest)
    completion = msgspec.convert({"model": "m", "prompt": "x"} | fields, CompletionRequest)
    return [plan_chat(chat), plan_completion(completion)]


@pytest.mark.parametrize("key", [None, "", "chat 1", "x" * 128])
def test_requests_keep_their_prompt_cache_key(key: str | None) -> None:
    for submit_plan in plan(prompt_cache_key=key):
        assert [request.prompt_cache_key for request in submit_plan.requests] == [key]


def test_prompt_cache_keys_are_bounded() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"<= 128 - at `\$.prompt_cache_key`"):
        plan(prompt_cache_key="x" * 129)


@pytest.mark.parametrize(
    ("fields", "lane"),
    [
        ({}, "interactive"),
        ({"priority": 0}, "interactive"),
        ({"priority": 1}, "batch"),
        ({"service_tier": "flex"}, "batch"),
        ({"service_tier": "flex", "priority": -1}, "batch"),
        ({"service_tier": "priority", "priority": 1}, "batch"),
        ({"service_tier": "auto"}, "interactive"),
        ({"service_tier": "default"}, "interactive"),
        ({"service_tier": "priority"}, "interactive"),
    ],
)
def test_a_priority_above_zero_and_the_flex_tier_mean_the_batch_lane(
    fields: dict[str, Any], lane: str
) -> None:
    for submit_plan in plan(**fields):
        assert [request.lane for request in submit_plan.requests] == [lane]


@pytest.mark.parametrize("options", [None, {}, {"use_audio_in_video": False}])
def test_the_sound_of_a_video_is_heard_where_it_is_asked_for(options: Any) -> None:
    parts = [{"type": "video_url", "video_url": {"url": "u", "use_audio": i > 0}} for i in range(2)]
    body = {"model": "m", "messages": [{"role": "user", "content": parts}]}
    for kwargs, expected in (
        (options, [False, True]),
        ({"use_audio_in_video": True}, [True, True]),
    ):
        chat = msgspec.convert(body | {"mm_processor_kwargs": kwargs}, ChatRequest)
        (request,) = plan_chat(chat).requests
        assert request.messages is not None
        (content,) = [message.content for message in request.messages]
        assert isinstance(content, list)
        uses_audio = [part.video_url.use_audio for part in content if isinstance(part, VideoPart)]
        assert uses_audio == expected


def test_errors_of_a_sound_name_the_field_that_the_client_has_sent() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AA", "format": "wav"}}
    url = {"type": "audio_url", "audio_url": {"url": "data:,"}}
    messages = [{"role": "user", "content": "x"}, {"role": "user", "content": [url, sound]}]
    chat = msgspec.convert({"model": "m", "messages": messages}, ChatRequest)
    fields = CHAT.fields_of(plan_chat(chat).options)
    of_url, of_sound = (f"messages[1].content[{i}].audio_url.url" for i in range(2))
    assert fields.name_of(of_url) == of_url
    assert fields.name_of(of_sound) == "messages[1].content[1].input_audio.data"


def test_the_fields_of_countless_sounds_are_not_stored() -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "", "format": ""}}
    messages = [{"role": "user", "content": [sound] * 1000}]
    chat = msgspec.convert({"model": "m", "messages": messages}, ChatRequest)
    assert len(plan_chat(chat).options.fields) == MAX_NAMED_FILES


def test_other_options_of_processors_are_refused() -> None:
    with pytest.raises(msgspec.ValidationError, match="unknown field `fps`"):
        plan(mm_processor_kwargs={"fps": 2})

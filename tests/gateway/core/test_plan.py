"""What requests of the OpenAI API say to the bus."""

from typing import Any

import msgspec
import pytest

from workers.gateway.core.plan import SubmitPlan
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.completions import plan_completion
from workers.gateway.schemas.openai_request import ChatRequest, CompletionRequest


def plan(**fields: Any) -> list[SubmitPlan]:
    """Plans of a chat completion and of a completion with the same fields."""
    messages = [{"role": "user", "content": "x"}]
    chat = msgspec.convert({"model": "m", "messages": messages} | fields, ChatRequest)
    completion = msgspec.convert({"model": "m", "prompt": "x"} | fields, CompletionRequest)
    return [plan_chat(chat), plan_completion(completion)]


@pytest.mark.parametrize("key", [None, "", "chat 1", "x" * 128])
def test_requests_keep_their_prompt_cache_key(key: str | None) -> None:
    for one in plan(prompt_cache_key=key):
        assert [request.prompt_cache_key for request in one.requests] == [key]


def test_prompt_cache_keys_are_bounded() -> None:
    with pytest.raises(msgspec.ValidationError, match=r"<= 128 - at `\$.prompt_cache_key`"):
        plan(prompt_cache_key="x" * 129)

"""Bodies of `/generate`, as vLLM's demo server has them. Pure."""

from msgspec import Struct

from workers.gateway.schemas.openai_request import CommonRequest, Count


class DemoRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str
    model: str = ""
    """By default the first one that is configured."""
    max_tokens: Count | None = None


class DemoAnswer(Struct, frozen=True):
    text: list[str]
    """The prompt with its answer so far, once for each choice."""

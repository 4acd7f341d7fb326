"""Request and response bodies of `/generate`, the endpoint of vLLM's demo server. Pure."""

from msgspec import Struct

from workers.gateway.schemas.openai_request import CommonRequest, Count


class DemoRequest(CommonRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    prompt: str
    model: str = ""
    """By default the first configured model."""
    max_tokens: Count | None = None


class DemoAnswer(Struct, frozen=True):
    text: list[str]
    """The prompt followed by the answer so far, for each choice."""

"""Requests: the messages that clients write, and the prompt that is made of one."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import InvalidRequest
from shared.protocol.encoding import json_or_msgpack, to_json
from shared.protocol.multimodal import IMAGE, Modality
from shared.protocol.sampling import SamplingParams, TokenId
from shared.protocol.subjects import NAME_RULE, is_name

TENANT_HEADER = "Pagemill-Tenant"
"""For whom a request is: a name like a request id; without the header, for nobody in particular.

Nothing that is cached for one tenant is found for another. Whoever may publish requests is trusted
to say for whom: the header is set by what has authenticated the client, and never copied from what
the client has written. A body that names a tenant is refused like any unknown field.
"""


def tenant_of(header: str | None) -> str:
    """For whom a request is, by its TENANT_HEADER; "" without one.

    Whoever may publish requests is trusted in this. Raises InvalidRequest for what is no name: were
    it taken for none, a slip in one gateway would put its tenants together with everybody else.
    """
    if header is None:
        return ""
    if not is_name(header):
        raise InvalidRequest(f"the header {TENANT_HEADER} {NAME_RULE}", field=TENANT_HEADER)
    return header


def tenant_header(tenant: str) -> dict[str, str]:
    """As headers of a message; none for nobody in particular."""
    return {TENANT_HEADER: tenant} if tenant else {}


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    """`url` is a `data:` URL with base64, `media:` and the SHA-256 of a picture that was stored
    before, or http(s) where the operator allows it."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    modality: ClassVar[Modality] = IMAGE
    url_field: ClassVar[str] = "image_url.url"
    image_url: ImageURL

    @property
    def url(self) -> str:
        return self.image_url.url


ContentPart = TextPart | ImagePart


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """None only beside `tool_calls`."""
    tool_calls: list[ToolCall] = []
    """Tool calls made by the assistant."""
    tool_call_id: str | None = None
    """The call whose result a tool's message holds."""
    name: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=1024)]


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


Tools = Annotated[list[Tool], Meta(max_length=128)]


class Feature(Struct, frozen=True, forbid_unknown_fields=True):
    """A picture that somebody else has processed, and where in the prompt its tokens are."""

    modality: Modality
    mm_hash: Annotated[str, Meta(min_length=1, max_length=128)]
    """Whatever the client calls it by; our caches do not trust it."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    length: Annotated[int, Meta(gt=0, le=2**31 - 1)]
    data: Annotated[str, Meta(pattern="^media:[0-9a-f]{64}$")] | None = None
    """Names the item's bytes, stored like a picture; None for an item that the same tenant has sent
    before under the same `mm_hash`."""


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt is one of three: `messages`, `prompt` or `prompt_token_ids`."""

    model: str
    messages: Messages | None = None
    sampling_params: SamplingParams | UnsetType = UNSET
    """Fields left out take the model's configured defaults."""
    request_id: str | None = None
    """May be given here or as the `Nats-Msg-Id` header; if both, they must agree."""
    lane: Literal["interactive", "batch"] = "interactive"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """From acceptance to the last record; by default and at most what is configured."""
    adapter: str | None = None
    """One of the model's configured LoRA adapters; without one the model answers as it is."""
    prompt: str | None = None
    """Text as it is, in which the tokenizer may find control tokens."""
    prompt_token_ids: TokenIds | None = None
    """Taken as they are; a picture's tokens are there already, and it itself is in `features`."""
    features: Annotated[list[Feature], Meta(max_length=1024)] = []
    """Only with `prompt_token_ids`."""
    tools: Tools = []
    """Only with `messages`, like `template_kwargs`."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; `add_generation_prompt` and `continue_final_message` mean
    what they mean in transformers."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own, such as a BOS. By default it does to a `prompt`, and to
    messages where the model's own processor does."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Nothing that is cached for one salt is found with another, or without one."""
    outputs: Annotated[list[str], Meta(max_length=8)] = []
    """Names of the model's outputs that the request wants; by default its text."""


class Prompt(Struct, frozen=True, omit_defaults=True):
    """What a request asks, checked: one of `messages`, `text` and `token_ids`.

    The other fields mean what those of GenerateRequest mean; see `shared.protocol.prompts`.
    """

    messages: list[Message] = []
    text: str | None = None
    token_ids: list[int] | None = None
    features: list[Feature] = []
    tools: list[Tool] = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None


decode_request = json_or_msgpack(GenerateRequest)


def encode_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> bytes:
    """JSON. `sampling` are the parameters that were given, in place of `request`'s.

    A Struct does not tell a value that was given from a default that is equal to it, and the
    model's configured defaults give way to what was given alone.
    """
    if sampling is None:
        return to_json(request)
    return to_json(msgspec.structs.asdict(request) | {"sampling_params": sampling})

"""Requests: the messages that clients publish, and the prompt that is made of one."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import InvalidRequest
from shared.protocol.encoding import json_or_msgpack, to_json
from shared.protocol.images import ImageParams
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, FrameSampling, Modality, Overflow
from shared.protocol.names import NAME_RULE, is_name
from shared.protocol.sampling import SamplingParams, TokenId
from shared.protocol.versions import needed_for, needed_version, since

TENANT_HEADER = "Pagemill-Tenant"
"""Header with the tenant of a request, a name like a request id; without it there is no tenant.

Nothing that is cached for one tenant is found for another. Publishers of requests are trusted to
name the tenant: the component that has authenticated the client sets the header, and never copies
it from the client's message. A body that names a tenant is refused like any unknown field.
"""


def tenant_of(header: str | None) -> str:
    """Return the tenant that a request's TENANT_HEADER names; "" without the header.

    Raises InvalidRequest for a header that is no name. If it counted as no tenant, a mistake in one
    gateway would let its tenants share caches with all others.
    """
    if header is None:
        return ""
    if not is_name(header):
        raise InvalidRequest(f"the header {TENANT_HEADER} {NAME_RULE}", field=TENANT_HEADER)
    return header


def tenant_header(tenant: str) -> dict[str, str]:
    """Return the headers of a message of `tenant`; none without a tenant."""
    return {TENANT_HEADER: tenant} if tenant else {}


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    """The place of an image.

    `url` is a `data:` URL with base64, `media:` and the SHA-256 of an image that was stored before,
    or http(s) where the operator allows it.
    """

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    modality: ClassVar[Modality] = IMAGE
    url_field: ClassVar[str] = "image_url.url"
    image_url: ImageURL

    @property
    def url(self) -> str:
        return self.image_url.url


# The file of a sequence of JPEG files is its data: URL, in which commas tell the files apart.
SEQUENCE_HEAD = b"data:video/jpeg;base64,"
# From a frame in a quarter of an hour to the rates of fast cameras.
MIN_FPS, MAX_FPS = 0.001, 240.0


class VideoURL(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a video, as that of an image, and the frames that the model is given of it.

    `data:video/jpeg;base64,` with the JPEG files of all frames, each in base64 with commas between
    them, is a video too; all of its frames are taken, and its rate is `fps`, by default 1.
    """

    url: str
    fps: Annotated[float, Meta(ge=MIN_FPS, le=MAX_FPS)] | None = None
    """Frames per second that are taken; by default the model family's own number."""
    num_frames: Annotated[int, Meta(ge=1)] | None = None
    """Number of frames that are taken; not with `fps`."""
    max_frames: Annotated[int, Meta(ge=1)] | None = None
    """Limit on the frames that are taken, below the model's own."""
    use_audio: bool = False
    """Whether the model hears the sound of the video, if that has any, together with its frames."""


class VideoPart(Struct, frozen=True, forbid_unknown_fields=True, tag="video_url"):
    since_version: ClassVar[int] = 3
    modality: ClassVar[Modality] = VIDEO
    url_field: ClassVar[str] = "video_url.url"
    video_url: VideoURL

    @property
    def url(self) -> str:
        return self.video_url.url

    @property
    def sampling(self) -> FrameSampling:
        video = self.video_url
        return FrameSampling(
            video.fps, video.num_frames, video.max_frames, use_audio=video.use_audio
        )


class AudioURL(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The place of a sound, as that of an image."""

    url: str
    overflow: Overflow = "refuse"
    """What becomes of a sound that is longer than the model hears at once: it is refused, or `cut`
    to its beginning."""


class AudioPart(Struct, frozen=True, forbid_unknown_fields=True, tag="audio_url"):
    since_version: ClassVar[int] = 3
    modality: ClassVar[Modality] = AUDIO
    url_field: ClassVar[str] = "audio_url.url"
    audio_url: AudioURL

    @property
    def url(self) -> str:
        return self.audio_url.url

    @property
    def sampling(self) -> FrameSampling:
        return FrameSampling(overflow=self.audio_url.overflow)


MediaContent = ImagePart | VideoPart | AudioPart
"""Content parts that name a file by a URL."""
ContentPart = TextPart | MediaContent


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
    """A medium that another server has processed, and the range of its tokens in the prompt."""

    modality: Annotated[Modality, since(3, VIDEO, AUDIO)]
    mm_hash: Annotated[str, Meta(min_length=1, max_length=128)]
    """The client's own hash of the item; caches of the server do not trust it."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    length: Annotated[int, Meta(gt=0, le=2**31 - 1)]
    data: Annotated[str, Meta(pattern="^media:[0-9a-f]{64}$")] | None = None
    """Name of the item's bytes, which are stored like a file; None for an item that the same
    tenant has sent before under the same `mm_hash`."""


class EmbeddingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How the pooled final hidden state of the prompt becomes an embedding."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of leading values that are kept; by default all."""
    normalize: bool | None = None
    """Scale the kept values to a Euclidean length of 1; by default as the model's folder says in
    `modules.json`, and true without that file."""


OnLate = Literal["fail", "text"]


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A request for an answer; its prompt is in `messages`, `prompt` or `prompt_token_ids`."""

    model: str
    """The name as configured, not encoded as in the subject."""
    messages: Messages | None = None
    sampling_params: SamplingParams | UnsetType = UNSET
    """Parameters that are left out have the model's configured defaults."""
    request_id: str | None = None
    """Id of the request, here or in the `Nats-Msg-Id` header; if in both, they must agree."""
    lane: Literal["interactive", "batch"] = "interactive"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Most seconds from acceptance to the last record; the configuration has the default and the
    maximum."""
    adapter: str | None = None
    """Name of one of the model's configured LoRA adapters; None for the model without adapters."""
    prompt: str | None = None
    """Text without a template, in which the tokenizer may find control tokens."""
    prompt_token_ids: TokenIds | None = None
    """The prompt's tokens, among them those of media, which are in `features`."""
    features: Annotated[list[Feature], Meta(max_length=1024)] = []
    """Processed media of the prompt; only with `prompt_token_ids`."""
    tools: Tools = []
    """Functions that the model may call; only with `messages`, like `template_kwargs`."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; `add_generation_prompt` and `continue_final_message` have the
    meaning that transformers gives them."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens, such as a BOS. By default it adds them to a
    `prompt`, and to messages if the model's own processor does."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Salt of the caches: an entry made with one salt is not found with another, or without."""
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None
    """Requests of a tenant with the same key are served by the same engine if they can, for a model
    with slots: a name of what their prompts share, such as a conversation."""
    outputs: Annotated[list[str], Meta(max_length=8)] = []
    """Names of the requested outputs of the model; by default its text."""
    given_text: Annotated[str, Meta(min_length=1)] | None = None
    """In the place of a prompt, the text itself: no stage writes it, and the other outputs are made
    of it as it is. Only with outputs that are made of the text."""
    voice: str | None = None
    """Name of the voice that speaks the text; by default the model's first one."""
    on_late: OnLate = "fail"
    """What becomes of a request with several outputs when the others are not complete by the
    deadline, or one of them fails: `text` ends it with its text alone, if that is complete."""
    image: ImageParams | None = None
    """How images are painted of the `prompt`; only for a model that paints."""
    embedding: EmbeddingParams | None = None
    """Return an embedding of the prompt instead of an answer; not with `sampling_params`."""


class Prompt(Struct, frozen=True, omit_defaults=True):
    """The checked prompt of a request: one of `messages`, `text` and `token_ids`.

    The other fields are those of GenerateRequest; see `shared.protocol.prompts`.
    """

    messages: list[Message] = []
    text: str | None = None
    token_ids: list[int] | None = None
    features: list[Feature] = []
    tools: list[Tool] = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None


decode_request = json_or_msgpack(GenerateRequest)


def count_media(request: GenerateRequest) -> int:
    """Return the number of media in the messages and of processed items of a request."""
    contents = (message.content for message in request.messages or [])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(not isinstance(part, TextPart) for part in parts) + len(request.features)


def encode_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> bytes:
    """Return the request as JSON, with the sampling parameters `sampling` if they are given.

    In a Struct, a given value cannot be told from a default that is equal to it, and only given
    values take precedence over the model's configured defaults.
    """
    if sampling is None:
        return to_json(request)
    return to_json(msgspec.to_builtins(request) | {"sampling_params": sampling})


def version_of_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> int:
    """Return the version that a reader of `encode_request` needs."""
    needed = needed_version(request)
    return needed if sampling is None else max(needed, needed_for(SamplingParams, sampling))

"""Requests: the messages that clients publish, and the prompt in them."""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import InvalidRequest
from shared.helpers import patterns
from shared.protocol.encoding import ClientDecoder, to_json
from shared.protocol.images import ImageParams
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, FrameSampling, Modality, Overflow
from shared.protocol.names import NAME_RULE, is_name
from shared.protocol.sampling import SamplingParams, TokenId
from shared.protocol.versions import needed_for, needed_version, since
from shared.protocol.videos import VideoParams

TENANT_HEADER = "Pagemill-Tenant"
"""Header with the tenant of a stored message or of a call of renderers, a name like a request id.

Without it there is no tenant. Requests have their tenant in their subject instead. Publishers of
calls are trusted to name the tenant: the component that has authenticated the client sets the
header, and never copies it from the client's message.
"""


def tenant_of(header: str | None) -> str:
    """Return the tenant in the TENANT_HEADER of a call of renderers; "" without the header.

    Raises InvalidRequest for an invalid name. If such a call were accepted without a tenant, a
    mistake in one gateway would make its tenants share caches with all others.
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
    """URL of an image.

    `url` is a `data:` URL with base64, `media:` and the SHA-256 of an image that was stored before,
    or http(s) if the operator allows it.
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


# The file of a sequence of JPEG files is its data: URL, with commas between the files.
SEQUENCE_HEAD = b"data:video/jpeg;base64,"
# From one frame in a quarter of an hour to the rates of fast cameras.
MIN_FPS, MAX_FPS = 0.001, 240.0


class VideoURL(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """URL of a video, as for an image, and the selection of its frames.

    `data:video/jpeg;base64,` with the JPEG files of all frames, each in base64 with commas between
    them, is a video too; all of its frames are used, and its rate is `fps`, by default 1.
    """

    url: str
    fps: Annotated[float, Meta(ge=MIN_FPS, le=MAX_FPS)] | None = None
    """Frames per second to use; by default the rate of the model family."""
    num_frames: Annotated[int, Meta(ge=1)] | None = None
    """Number of frames to use; not with `fps`."""
    max_frames: Annotated[int, Meta(ge=1)] | None = None
    """Limit on the number of frames, below the limit of the model."""
    use_audio: bool = False
    """Whether the model also gets the sound of the video, if there is any."""


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
    """URL of a sound, as for an image."""

    url: str
    overflow: Overflow = "refuse"
    """Treatment of a sound that is longer than the model's limit: `refuse`, or `cut` to its
    beginning."""


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


Pages = Annotated[str, Meta(pattern=patterns.PAGES, max_length=256)]
"""Numbers and ranges of pages, such as `1-3,7`."""
Dpi = Annotated[int, Meta(ge=18, le=600)]
DEFAULT_DPI = 150
DocumentMode = Literal["images", "text", "both"]


class DocumentURL(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """URL of a PDF document, as for an image, and the selection of its pages."""

    url: str
    pages: Pages | None = None
    """Pages to use, in this order, such as `1-3,7`; by default all."""
    dpi: Dpi = DEFAULT_DPI
    """Resolution of the images, in dots per inch."""
    mode: DocumentMode = "images"
    """The model gets `images` of the pages, the `text` that the file has for them, or `both`: the
    text of a page follows its image."""


class DocumentPart(Struct, frozen=True, forbid_unknown_fields=True, tag="document_url"):
    since_version: ClassVar[int] = 3
    modality: ClassVar[Modality] = IMAGE
    url_field: ClassVar[str] = "document_url.url"
    document_url: DocumentURL

    @property
    def url(self) -> str:
        return self.document_url.url


MediaContent = ImagePart | VideoPart | AudioPart | DocumentPart
"""Content parts that name a file by a URL."""
ContentPart = TextPart | MediaContent


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text written by the model."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=patterns.NAME)]
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
    """Content; None is allowed only together with `tool_calls`."""
    tool_calls: list[ToolCall] = []
    """Tool calls made by the assistant."""
    tool_call_id: str | None = None
    """Id of the call that a tool's message has the result of."""
    name: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=1024)]


TokenIds = Annotated[list[TokenId], Meta(min_length=1)]


Tools = Annotated[list[Tool], Meta(max_length=128)]


class Feature(Struct, frozen=True, forbid_unknown_fields=True):
    """Medium that another server has processed, and the range of its tokens in the prompt."""

    modality: Annotated[Modality, since(3, VIDEO, AUDIO)]
    mm_hash: Annotated[str, Meta(min_length=1, max_length=128)]
    """Hash of the item, chosen by the client. Caches use their own content hash instead."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    length: Annotated[int, Meta(gt=0, le=2**31 - 1)]
    data: Annotated[str, Meta(pattern=patterns.MEDIA_URL)] | None = None
    """Name of the item's bytes, which are stored like a file; None for an item that the same
    tenant has sent before with the same `mm_hash`."""


class EmbeddingParams(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Parameters of an embedding, which is the pooled final hidden state of the prompt."""

    dimensions: Annotated[int, Meta(ge=1)] | None = None
    """Number of leading values to return; by default all."""
    normalize: bool | None = None
    """Scale the returned values to a Euclidean length of 1; by default as in `modules.json` of the
    model's folder, and true without that file."""


OnLate = Literal["fail", "text"]


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Request for an answer. The prompt is in `messages`, `prompt` or `prompt_token_ids`."""

    model: str
    """Configured name of the model, not encoded as in the subject."""
    messages: Messages | None = None
    sampling_params: SamplingParams | UnsetType = UNSET
    """Sampling parameters. Omitted parameters have the model's configured defaults."""
    lane: Literal["interactive", "batch"] = "interactive"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """Maximum seconds from acceptance to the last record. The configuration has the default and the
    limit."""
    adapter: str | None = None
    """Name of one of the model's configured LoRA adapters; None for the model without adapters."""
    prompt: str | None = None
    """Text without a chat template. The tokenizer recognizes control tokens in it."""
    prompt_token_ids: TokenIds | None = None
    """Tokens of the prompt, including the tokens of the media in `features`."""
    features: Annotated[list[Feature], Meta(max_length=1024)] = []
    """Processed media of the prompt; only with `prompt_token_ids`."""
    tools: Tools = []
    """Functions that the model may call; only with `messages`, like `template_kwargs`."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template. `add_generation_prompt` and `continue_final_message` have the
    same meaning as in transformers."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds special tokens, such as a BOS. By default it adds them to a
    `prompt`, and to messages if the model's own processor does."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Salt of the caches. Requests share cache entries only with requests with the same salt."""
    prompt_cache_key: Annotated[str, Meta(max_length=128)] | None = None
    """Name of the common beginning of several prompts, such as a conversation. For a model with
    slots, requests of a tenant with the same key are served by the same engine if possible."""
    outputs: Annotated[list[str], Meta(max_length=8)] = []
    """Names of the requested outputs of the model; by default its text."""
    given_text: Annotated[str, Meta(min_length=1)] | None = None
    """Text of the answer, instead of a prompt. No stage writes it, and the other outputs are made
    from it. Only with outputs that are made from the text."""
    voice: str | None = None
    """Name of the voice that speaks the text; by default the model's first one."""
    on_late: OnLate = "fail"
    """Treatment of a request with several outputs if an output other than the text fails or is not
    complete by the deadline: `fail`, or `text` to end it with the text alone if it is complete."""
    image: ImageParams | None = None
    """Parameters of images that are painted from `prompt`; only for a model that paints."""
    video: Annotated[VideoParams | None, since(3)] = None
    """Parameters of a video that is made from `prompt`; only for a model that makes videos."""
    embedding: EmbeddingParams | None = None
    """Return an embedding of the prompt instead of an answer; not with `sampling_params`."""


class Prompt(Struct, frozen=True, omit_defaults=True):
    """Validated prompt of a request: one of `messages`, `text` and `token_ids`.

    The other fields are as in GenerateRequest; see `shared.protocol.prompts`.
    """

    messages: list[Message] = []
    text: str | None = None
    token_ids: list[int] | None = None
    features: list[Feature] = []
    tools: list[Tool] = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None


decode_request = ClientDecoder(GenerateRequest)


def count_media(request: GenerateRequest) -> int:
    """Return the number of media in the messages and features of a request."""
    contents = (message.content for message in request.messages or [])
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return sum(not isinstance(part, TextPart) for part in parts) + len(request.features)


def encode_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> bytes:
    """Return the request as JSON, with `sampling` as its sampling parameters.

    Only given values take precedence over the model's configured defaults, and a Struct does not
    distinguish a given value from an equal default.
    """
    if sampling is None:
        return to_json(request)
    return to_json(msgspec.to_builtins(request) | {"sampling_params": sampling})


def version_of_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> int:
    """Return the version that a reader of `encode_request` needs."""
    needed = needed_version(request)
    return needed if sampling is None else max(needed, needed_for(SamplingParams, sampling))

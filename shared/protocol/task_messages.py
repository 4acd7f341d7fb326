"""Tasks: the messages between stages. All have the same header, and a body for their stage."""

from typing import Annotated, ClassVar, Generic, TypeVar

from msgspec import Struct

from shared.protocol import subjects
from shared.protocol.encoding import Versioned
from shared.protocol.images import PaintParams
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, content_hash
from shared.protocol.records import StageSpan
from shared.protocol.requests import EmbeddingParams, OnLate, Prompt
from shared.protocol.sampling import SamplingParams
from shared.protocol.versions import since


class RequestTicket(Struct, frozen=True, array_like=True):
    """Data of a request that all of its tasks contain, from its acceptance to its end.

    The request itself stays in its queue until then. The worker that ends it acknowledges it there
    with `receipt`. Times are Unix milliseconds of the broker's clock.
    """

    accepted_ms: float
    deadline_ms: float
    sequence: int
    """Sequence of the request in `stream`."""
    receipt: str
    tenant: str = ""
    """Part of the keys of all caches; see TENANT_HEADER."""
    cache_salt: str = ""
    """Another part of these keys, chosen by the client."""
    prompt_cache_key: str = ""
    """Key from the client that determines the slot of the request's tasks; may be empty."""
    stream: Annotated[str, since(3)] = subjects.REQUESTS_STREAM
    """Queue of the request: REQUESTS, or `REQUESTS_<tenant>` for a client with a tenant's key."""
    traceparent: Annotated[str, since(1)] = ""
    """Header `traceparent` of W3C for spans below the request's root span; may be empty."""
    tracestate: Annotated[str, since(1)] = ""

    @property
    def place(self) -> subjects.RequestPlace:
        return subjects.RequestPlace(self.stream, self.sequence)

    @property
    def cache_scope(self) -> str:
        """Tenant and salt in one value. Scopes share no cache entries."""
        return content_hash(self.tenant, self.cache_salt) if self.cache_salt else self.tenant


class TaskHeader(Struct, frozen=True, omit_defaults=True):
    """Header of every task: data of its request, or of its item."""

    request_id: str
    """Id of the request; for an item task its name, see `shared.protocol.subjects.item_task`."""
    model: str
    lane: str
    ticket: RequestTicket | None = None
    """None for an item task, because several requests may wait for its result."""
    sampling: SamplingParams = SamplingParams()
    """Sampling parameters, with all defaults resolved."""
    path: list[StageSpan] = []
    """Previous stages of the request."""
    round: int = 0
    """Number of times that payloads of the request were lost and rendered again."""
    adapter: str | None = None
    outputs: list[str] = []
    """Outputs of the request, which determine the stages that run; empty for text alone."""
    embedding: Annotated[EmbeddingParams | None, since(2)] = None
    """Set if the answer is an embedding of the prompt, without tokens."""
    text_given: bool = False
    """Whether the request gives its text itself, and so starts at the stages that follow a text."""
    voice: str | None = None
    """Voice that speaks the text; None if no stage of the request speaks."""
    on_late: OnLate = "fail"
    """As in the request."""
    image: PaintParams | None = None
    """Parameters of images or of a video; None if no stage of the request makes them."""
    expires_ms: float = 0.0
    """Time after which no request waits for the result of an item task, by the broker's clock."""
    version: int = 1
    """Version that a worker needs to read the task, see `shared.protocol.versions`."""
    writer_version: Annotated[int, since(1)] = 1
    """Version of the worker that has written the task. If a worker with an older version cannot
    decode the task, it is left to a newer one."""


class TaskBody(Struct, frozen=True):
    """Base of all task bodies. A body is the part of a task for one role."""

    def blobs(self) -> list[BlobRef]:
        """Return the large payloads of the task, which are released when it is acknowledged."""
        return []


Body = TypeVar("Body")


class Task(Struct, Generic[Body], frozen=True):
    """Message of a stage: the head of an envelope, with the tensors as the envelope's buffers."""

    header: TaskHeader
    body: Body


class RenderBody(TaskBody, frozen=True):
    """Task body for renderers: the prompt of the client."""

    prompt: Prompt


class KVBlob(Struct, frozen=True, array_like=True):
    """Keys and values of consecutive full blocks of a prompt, in the memory of a prefill worker."""

    ref: BlobRef
    name: str
    """Hash of the layout and of the blocks' hashes, so that blocks of another layout differ."""
    first: int
    """Index of the first block in the prompt."""
    num_blocks: int
    digest: bytes
    """BLAKE3 of the blob's bytes."""


class EngineBody(TaskBody, frozen=True, omit_defaults=True):
    """Task body for engines and prefill workers: expanded token ids, and items with their tensors
    in the envelope or in blobs."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    kv: list[KVBlob] = []
    """Computed blocks of the prompt, in order. They are a cache: an engine that cannot read them
    computes the prompt."""

    def blobs(self) -> list[BlobRef]:
        of_items = [item.blob for item in self.items if item.blob is not None]
        return of_items + [blocks.ref for blocks in self.kv]


class EncodeBody(TaskBody, frozen=True):
    """Task body for encoders: one item. Simultaneous requests with the item share one task."""

    key: str
    """Name of the embeddings, see `shared.vision.embedding_store`."""
    item: MultiModalKwargsItem
    """The item. Its placeholder counts the embeddings; its position in a prompt has no meaning."""

    def blobs(self) -> list[BlobRef]:
        return [] if self.item.blob is None else [self.item.blob]


class FollowBody(TaskBody, frozen=True):
    """Task body for a stage that follows other stages: names of outputs by the carried kind."""

    inputs: dict[str, str]


class SpeechBody(TaskBody, frozen=True, omit_defaults=True):
    """Task body for a stage that speaks a text."""

    text: str | None = None
    """Given text of the request; None for a text that another stage writes."""
    prompt_token_ids: list[int] = []
    """Prompt of the text, for a talker that needs it."""
    items: Annotated[list[MultiModalKwargsItem], since(3)] = []
    """Items in the prompt, as in an `EngineBody`."""

    def blobs(self) -> list[BlobRef]:
        return [item.blob for item in self.items if item.blob is not None]


class PaintBody(TaskBody, frozen=True):
    """Task body for a stage that paints images, or makes a video, from a text."""

    text: str


class TextsBody(TaskBody, frozen=True):
    """Item task of a stage that encodes texts for a stage that paints."""

    since_version: ClassVar[int] = 3

    key: str
    """Name of the result, which is a blob with the encoded texts."""
    texts: list[str]
    """The prompt, and with guidance the negative prompt."""
    scope: str
    """Scope of caches, as in the ticket of the request."""
    tenant: str
    images: list[str]
    """`media:` URLs of the images to edit."""
    due_s: float
    """Urgency of the first request, in seconds of Unix time; the smallest is next."""


class LatentsBody(TaskBody, frozen=True):
    """Item task of a stage that decodes latents for a stage that paints."""

    since_version: ClassVar[int] = 3

    key: str
    """Name of the result, which is the `media:` URL of the file."""
    latents: str
    """`media:` URL of the latents."""
    width: int
    height: int
    fps: int | None
    """Frames of a second of a video; None for an image."""
    tenant: str
    due_s: float
    """Urgency of the request, in seconds of Unix time; the smallest is next."""


class ItemResult(Versioned, frozen=True):
    """Result of an item task: a blob, small bytes, or neither if it is stored elsewhere."""

    blob: BlobRef | None = None
    data: bytes | None = None

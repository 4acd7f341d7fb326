"""Tasks: the messages between stages. Each has the same header, and a body that its stage reads."""

from typing import Annotated, Generic, TypeVar

from msgspec import Struct

from shared.protocol.encoding import Versioned
from shared.protocol.images import PaintParams
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, content_hash
from shared.protocol.records import StageSpan
from shared.protocol.requests import EmbeddingParams, OnLate, Prompt
from shared.protocol.sampling import SamplingParams
from shared.protocol.versions import since


class RequestTicket(Struct, frozen=True, array_like=True):
    """What accompanies a request from its acceptance to its end.

    The request itself stays in its queue until then. The worker that ends it acknowledges it there,
    by `receipt`. Times are Unix milliseconds of the broker's clock.
    """

    accepted_ms: float
    deadline_ms: float
    sequence: int
    """In stream REQUESTS."""
    receipt: str
    tenant: str = ""
    """Part of the key of every cache on the way; see TENANT_HEADER."""
    cache_salt: str = ""
    """Another part of these keys, chosen by the client."""
    prompt_cache_key: str = ""
    """Decides on the slot of the request's tasks, if the client has given it."""

    @property
    def cache_scope(self) -> str:
        """Tenant and salt in one: nothing cached in one scope is found in another."""
        return content_hash(self.tenant, self.cache_salt) if self.cache_salt else self.tenant


class TaskHeader(Struct, frozen=True, omit_defaults=True):
    """What every stage's task says of its request, or of the item that it is about."""

    request_id: str
    """The request's id; for an item task its name, see `shared.protocol.subjects.item_task`."""
    model: str
    lane: str
    ticket: RequestTicket | None = None
    """None for an item task: several requests may wait for its result."""
    sampling: SamplingParams = SamplingParams()
    """All defaults resolved."""
    path: list[StageSpan] = []
    """The stages behind this one."""
    round: int = 0
    """How often payloads of the request have been lost and rendered again."""
    adapter: str | None = None
    outputs: list[str] = []
    """The outputs that the request has, which decide the stages that run; empty for text alone."""
    embedding: Annotated[EmbeddingParams | None, since(2)] = None
    """The request is answered by an embedding of its prompt, without tokens."""
    text_given: bool = False
    """The request gives its text itself: it starts at the stages that follow a text."""
    voice: str | None = None
    """The voice that speaks the text; None where no stage of the request speaks."""
    on_late: OnLate = "fail"
    """As in the request."""
    image: PaintParams | None = None
    """How images are painted; None where no stage of the request paints."""
    expires_ms: float = 0.0
    """When nobody waits for the result of an item task any more; by the broker's clock."""
    version: int = 1
    """The version that a worker needs to read the task, see `shared.protocol.versions`."""
    writer_version: Annotated[int, since(1)] = 1
    """The version of the worker that has written the task. A newer worker reads what an older one
    cannot decode."""


class TaskBody(Struct, frozen=True):
    """Base of all task bodies: the part of a task that one role reads."""

    def blobs(self) -> list[BlobRef]:
        """Large payloads that came with the task, released when it is acknowledged."""
        return []


Body = TypeVar("Body")


class Task(Struct, Generic[Body], frozen=True):
    """The message of every stage, as the head of an envelope whose buffers are its tensors."""

    header: TaskHeader
    body: Body


class RenderBody(TaskBody, frozen=True):
    """For renderers: the prompt as the client wrote it."""

    prompt: Prompt


class KVBlob(Struct, frozen=True, array_like=True):
    """Keys and values of consecutive full blocks of a prompt, in the memory of a prefill worker."""

    ref: BlobRef
    name: str
    """Hash of the layout and of the blocks' hashes: blocks of another layout are not found."""
    first: int
    """Index of the first block in the prompt."""
    num_blocks: int
    digest: bytes
    """BLAKE3 of the blob's bytes."""


class EngineBody(TaskBody, frozen=True, omit_defaults=True):
    """For engines and prefill workers: expanded token ids, and items whose tensors are in the
    envelope or in blobs."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    kv: list[KVBlob] = []
    """Computed blocks of the prompt, in their order. They are a cache: an engine that cannot read
    them computes the prompt."""

    def blobs(self) -> list[BlobRef]:
        of_items = [item.blob for item in self.items if item.blob is not None]
        return of_items + [blocks.ref for blocks in self.kv]


class EncodeBody(TaskBody, frozen=True):
    """For encoders: one item. All requests that show it at the same time share one task."""

    key: str
    """Names the embeddings, see `shared.vision.embedding_store`."""
    item: MultiModalKwargsItem
    """Its placeholder counts the embeddings; their position in a prompt does not matter here."""

    def blobs(self) -> list[BlobRef]:
        return [] if self.item.blob is None else [self.item.blob]


class FollowBody(TaskBody, frozen=True):
    """For a stage that follows outputs of other stages: what each carries → the output's name."""

    inputs: dict[str, str]


class SpeechBody(TaskBody, frozen=True, omit_defaults=True):
    """For a stage that speaks a text."""

    text: str | None = None
    """None for the request's own text, which another stage writes."""
    prompt_token_ids: list[int] = []
    """For a talker that needs it, the prompt that the request's own text answers."""


class PaintBody(TaskBody, frozen=True):
    """For a stage that paints images of a text."""

    text: str


class ItemResult(Versioned, frozen=True):
    """The result of an item task: a worker's blob, small bytes, or neither if it is elsewhere."""

    blob: BlobRef | None = None
    data: bytes | None = None

"""Embeddings: the plan of a request, and the assembler of its answer. Pure.

Each input is a separate request on the bus. An embedding is brought into its form in the answer
when it arrives, so that the end of a large answer does not occupy the event loop.
"""

import array
import base64
import sys
from abc import abstractmethod
from typing import Any, TypeVar

import msgspec

from shared.errors import InvalidRequest, WorkerFailure
from shared.protocol.encoding import to_json
from shared.protocol.records import AnyRecord, Finish, TokenChunk
from shared.protocol.requests import EmbeddingParams
from workers.gateway.core.assembler import PROMPT_FIELDS, Answering, AnswerOptions, Assembler
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.kinds import AnswerKind, Budget, Refusal
from workers.gateway.core.plan import MAX_PROMPTS, SubmitPlan, generate_request, prompts_of
from workers.gateway.schemas.embeddings import (
    MAX_INPUTS,
    EmbeddingEntry,
    EmbeddingList,
    EmbeddingRequest,
    EmbeddingUsage,
    EncodingFormat,
    PooledRequest,
)


class EmbeddingOptions(AnswerOptions, frozen=True, kw_only=True):
    parts: int = 1
    encoding_format: EncodingFormat = "float"


Options = TypeVar("Options", bound=AnswerOptions)


def plan_embedding(request: EmbeddingRequest) -> SubmitPlan[EmbeddingOptions]:
    """Return the plan of a request. Raises a RequestError naming the field."""
    params = EmbeddingParams(dimensions=request.dimensions)
    requests = [
        generate_request(request, embedding=params, prompt=prompt)
        if isinstance(prompt, str)
        else generate_request(
            request, embedding=params, prompt_token_ids=prompt, add_special_tokens=None
        )
        for prompt in prompts_of(request.input, "input", MAX_INPUTS)
    ]
    check_durable(request, len(requests))
    options = EmbeddingOptions(
        parts=len(requests), encoding_format=request.encoding_format or "float"
    )
    return SubmitPlan(requests, {}, options, durable=bool(request.durable))


def check_durable(request: PooledRequest, num_inputs: int) -> None:
    """Raise InvalidRequest if the inputs are too many to be published without their client.

    The gateway publishes some of them when others have ended, as long as it answers the request.
    """
    if request.durable and num_inputs > MAX_PROMPTS:
        raise InvalidRequest(
            f"durable: a request that continues without its client has at most {MAX_PROMPTS}"
            f" inputs, not {num_inputs}: use /v1/batches, or leave durable out",
            field="durable",
        )


class EmbeddingCollector(Assembler[Options]):
    """Base class of assemblers that need the embeddings of all parts."""

    def __init__(self, request: Answering[Options]) -> None:
        super().__init__(request)
        self.embeddings: dict[int, Any] = {}
        """Result of `read` for each part."""
        self.num_tokens = 0

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        if isinstance(record, TokenChunk) and record.embedding is not None:
            self.embeddings[part] = self.read(record.embedding)
        elif isinstance(record, Finish):
            self.num_tokens += record.usage.prompt_tokens
        return []

    @abstractmethod
    def read(self, data: str) -> Any:
        """Return an embedding as the answer needs it, from base64 of 32-bit floats."""

    @property
    def usage(self) -> EmbeddingUsage:
        return EmbeddingUsage(self.num_tokens, self.num_tokens)

    def check_all(self) -> None:
        """Raises WorkerFailure if a log has ended without an embedding."""
        num_embeddings, num_inputs = len(self.embeddings), self.options.parts
        if num_embeddings != num_inputs:
            raise WorkerFailure(f"{num_embeddings} of {num_inputs} inputs have an embedding")


class EmbeddingAssembler(EmbeddingCollector[EmbeddingOptions]):
    """Assembler of embeddings."""

    def __init__(self, request: Answering[EmbeddingOptions]) -> None:
        super().__init__(request)
        self._has_floats = self.options.encoding_format == "float"

    def read(self, data: str) -> Any:
        return msgspec.Raw(to_json(floats_of(data))) if self._has_floats else data

    def answer(self) -> EmbeddingList:
        """Raises WorkerFailure if a log has ended without an embedding."""
        self.check_all()
        entries = [EmbeddingEntry(*entry) for entry in sorted(self.embeddings.items())]
        return EmbeddingList(entries, self.request.model, self.usage)


def floats_of(data: str) -> list[float]:
    """Decode base64 of 32-bit floats, least significant byte first."""
    values = array.array("f", base64.b64decode(data))
    if sys.byteorder == "big":
        values.byteswap()
    return values.tolist()


def embeddings_budget(advice: str) -> Budget:
    """Return the memory budget of answers with embeddings, which are never streamed."""
    return Budget(prompts=Refusal("embeddings", "prompt", advice))


EMBEDDING = AnswerKind(
    name="embedding",
    id_prefix="embd",
    options=EmbeddingOptions,
    assembler=EmbeddingAssembler,
    client_fields=ClientFields(
        {
            **dict.fromkeys(PROMPT_FIELDS, "input"),
            "embedding.dimensions": "dimensions",
            "embedding": "model",
        }
    ),
    budget=embeddings_budget("ask for fewer, or for fewer dimensions"),
)

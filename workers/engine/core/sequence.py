"""Data types of the engine: requests, their sequences (one per choice) and the batch of a step.

They hold token ids, block ids and counts, and do not depend on torch.
"""

from collections.abc import Callable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import PagemillError
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.records import ChoiceDelta, TokenLogprobs, Usage
from shared.protocol.requests import EmbeddingParams
from shared.protocol.sampling import SamplingParams
from workers.engine.core.step_cost import StepWork


@dataclass(frozen=True, slots=True)
class Pooling:
    """Pooling of a model: the computation of a prompt's embedding from its hidden states."""

    mode: Literal["last", "mean"] = "last"
    normalize: bool = True
    """Whether embeddings are scaled to a length of 1, unless the request sets it."""


LAST_TOKEN = Pooling()
"""Pooling of models whose folders do not describe any."""


class Status(Enum):
    """Scheduling status of a sequence."""

    WAITING = "waiting"
    """The sequence holds no blocks: it is new, or was preempted and will be recomputed."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True, weakref_slot=True)
class Item:
    """A multimodal item as the runner encodes it; `fields` are torch tensors, except in tests.

    The tensors may be views of borrowed memory, which is returned when the item is collected.
    """

    modality: str
    mm_hash: str
    placeholder: PlaceholderRange
    fields: Mapping[str, Any]
    embedding: Any = None
    """Embedding, [placeholder length, hidden_size] or wider, if there is one. If an encoder has
    computed it, `fields` hold only metadata. The engine's tower thread sets it later."""
    attended: bool = False
    """Whether all tokens attend to the item, and not only tokens at and after its placeholder."""


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """Tokens of one choice that the token log already holds when a request is resumed."""

    token_ids: list[int]
    finished: bool
    residuals: list[list[int]] = field(default_factory=list)
    """The codes of a talker's further codebooks, for each token."""


@dataclass(frozen=True, slots=True)
class SpokenText:
    """Text that a talker speaks: the available part of an answer, and the prompt before it."""

    prompt_token_ids: list[int]
    answer_token_ids: list[int]
    voice: str | None
    num_inputs: int | None = None
    """Number of tokens in the talker's sequence that have their input rows so far; None for a whole
    answer, where all have them."""
    items: list[Item] = field(default_factory=list)
    """Items in the prompt. They are not set in later parts of an answer."""


Span = tuple[int, int]
"""Tokens [start, stop) of a sequence."""

SpokenTokens = Callable[[int], int]
"""Returns the number of tokens of a text that have been spoken after a number of frames."""


MakeText = Callable[[list[int], str | None], str]
"""Returns the text of new tokens of a choice and, with a finish reason, the end of its text. It is
called in the order of the tokens."""


class FrameDelta(ChoiceDelta, frozen=True, omit_defaults=True):
    """New tokens of a talker, with the codes of its further codebooks for each token."""

    residuals: list[list[int]] = msgspec.field(default_factory=list)


@dataclass(frozen=True, slots=True, weakref_slot=True)
class KVRun:
    """Keys and values of consecutive full blocks of a prompt, for exchange between engines.

    The data may be a view of borrowed memory, which is returned when the run is collected.
    """

    first: int
    """Index of the first block in the prompt."""
    hashes: list[str]
    data: tuple[memoryview, ...]
    """Content of all blocks, in parts; see `kv_exchange`."""


@dataclass(slots=True)
class ReceivedKV:
    """Blocks that came with a request, until the engine has copied them."""

    runs: list[KVRun]
    """Runs that are not copied yet, in the order of the prompt."""
    num_found: int = 0
    """Blocks of the prompt that were cached after the last copy."""

    @property
    def num_blocks(self) -> int:
        """Blocks of the prompt up to the last one that can be restored."""
        return max([run.first + len(run.hashes) for run in self.runs], default=0)

    def drop(self) -> None:
        """Release the memory of all runs."""
        self.runs.clear()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """A rendered request, ready to be scheduled."""

    request_id: str
    prompt_token_ids: list[int]
    items: list[Item]
    sampling: SamplingParams
    logged: list[LoggedChoice] = field(default_factory=list)
    """One entry per choice on a resume, none on a first attempt."""
    lane: str = "interactive"
    tenant: str = ""
    """Cached blocks and embeddings are never shared between tenants."""
    adapter: str | None = None
    """Name of the LoRA adapter. Cached blocks are not shared between adapters either."""
    new_token_mask: "Callable[[], TokenMask] | None" = None
    """Creates the token mask of each choice; None if the request has no grammar."""
    embedding: EmbeddingParams | None = None
    """If set, the request generates no tokens, and the embedding of its prompt is the output."""
    received: ReceivedKV | None = None
    """Blocks of the prompt that another engine has computed."""
    speech: SpokenText | None = None
    """For a talker: the text from which its input rows are made; the prompt's tokens are
    placeholders of rows. More of the text may follow while the request runs."""
    export_run_bytes: int = 0
    """If not 0, the last output holds the prompt's full blocks, in runs of about this size."""

    def items_within(self, start: int, stop: int) -> list[int]:
        """Return the indexes of the items on which the tokens [start, stop) depend directly.

        Their placeholders overlap the tokens, or all tokens attend to them.
        """
        ranges = [item.placeholder for item in self.items]
        return [
            i
            for i, r in enumerate(ranges)
            if self.items[i].attended or (r.offset < stop and start < r.offset + r.length)
        ]


class TokenMask(Protocol):
    """Tokens that a grammar allows next in a choice; a function of the choice's tokens so far."""

    def allowed(self) -> NDArray[np.int32] | None:
        """Return a bitmask of the allowed tokens, [ceil(vocab_size / 32)] int32; None allows all.

        Token 32 * i + j is allowed if bit j of word i is set, counted from the lowest bit. The
        array does not change before the next `advance`.
        """

    def advance(self, token_id: int) -> None:
        """Append a token that was sampled, or logged by an earlier attempt.

        Never raises: errors are raised by `allowed`, where they fail only this request.
        """


class Drafter(Protocol):
    """Proposes draft tokens for one sequence. They change the speed of an output, not its text."""

    def propose(self, token_ids: list[int], max_drafts: int) -> list[int]:
        """Return at most `max_drafts` drafts after `token_ids`, which only grow between calls."""

    def record_result(self, num_drafts: int, num_accepted: int) -> None:
        """Record how many of the drafts that went through the model were accepted."""


class SampledToken(msgspec.Struct, frozen=True):
    token_id: int
    logprobs: TokenLogprobs | None = None
    """Log probabilities, if the request asks for them."""
    residual: tuple[int, ...] = ()
    """The codes of a talker's further codebooks."""


class Operations(NamedTuple):
    """Operations of the sampler that a sequence needs."""

    is_greedy: bool
    is_filtered: bool
    is_processed: bool
    """Processed rows are copied, and therefore taken in chunks."""


class Sequence:
    """One choice of one request."""

    state_slot = 0
    """Slot of a running sequence in the pool of states, for a model with recurrent layers."""
    embedding = b""
    """Embedding of the prompt in 32-bit floats, once it is computed, if one is requested."""
    num_computed_tokens = 0
    """Tokens whose keys and values are in the KV cache."""
    num_launched_tokens = 0
    """Tokens up to the last one that a launched step writes into the KV cache."""
    num_verified_tokens = 0
    """Computed tokens verified by a later sample; see `prefix_cache`."""
    status = Status.WAITING
    is_prepared = False
    """Whether the runner holds all inputs of the sequence. False for a request with items, which
    are encoded as they are needed."""
    priority = (0.0, 0)
    """Scheduling priority; lower values are scheduled first."""
    awaited_items: AbstractSet[int] = frozenset()
    """Indexes of the request's items that a tower thread encodes. The choices of a request share
    the set."""
    operations: Operations | None = None
    """Operations of the sampler for all further tokens, once they are known."""
    points: tuple[int, list[float]] = (0, [])
    """Random numbers of the sampler: the first position in the output, and the numbers from there
    on."""
    peak_blocks = 0
    """Most blocks that the sequence has held, up to the last time when it gave blocks back."""
    num_registered_blocks = 0
    """Leading blocks of the block table that are registered in the prefix cache."""
    num_cached_tokens: int | None = None
    """Prompt tokens found in the cache on first admission; None before it."""

    def __init__(
        self,
        request: EngineRequest,
        choice: int,
        seed: int,
        token_ids: list[int],
        max_tokens: int,
        *,
        end_token_ids: tuple[int, ...] = (),
        bad_words: tuple[tuple[int, ...], ...] = (),
        token_mask: TokenMask | None = None,
        drafter: Drafter | None = None,
        prompt_logprobs: dict[int, TokenLogprobs] | None = None,
        speech: SpokenText | None = None,
        pooling: Pooling = LAST_TOKEN,
        spans: list[Span] | None = None,
    ) -> None:
        self.request = request
        self.request_id = request.request_id
        self.is_batch = request.lane == "batch"
        """Whether the sequence belongs to the batch lane."""
        self.samples_tokens = request.embedding is None
        """Whether tokens are generated after the prompt. Not in a request for an embedding."""
        self.num_prompt_tokens = len(request.prompt_token_ids)
        self.choice = choice
        self.seed = seed
        self.token_ids = token_ids
        """Prompt and output so far. While the scheduler looks ahead, the last token may be awaited.
        Its value is then -1 - i, where i is its index among the tokens of the step in flight."""
        self.max_tokens = max_tokens
        self.end_token_ids = end_token_ids
        """Tokens banned before `min_tokens`: the model's end tokens and the request's stop tokens.
        """
        self.bad_words = bad_words
        """Token ids of each bad word."""
        self.token_mask = token_mask
        self.drafter = drafter
        self.prompt_logprobs = prompt_logprobs
        """Prompt log probabilities computed so far, by position; None if not requested."""
        self.speech = speech
        """Text that a talker speaks, as far as it has arrived."""
        self.pooling = pooling
        self.spans = spans or []
        """Runs of prompt tokens that attend to each other in both directions, in order."""
        self.residuals: list[list[int]] = []
        """For a talker: the codes of further codebooks of each output token."""
        self.hidden_sums: dict[int, Any] = {}
        """Sums of the hidden states of leading tokens, by the number of tokens: before and after
        the last step. A repeated step begins with the same sum."""
        self.block_table: list[int] = []
        self.block_hashes: list[str] = []
        """Hashes of the first blocks, computed on demand."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def num_computable_tokens(self) -> int:
        """Tokens that can go through the model now; the others wait for their inputs."""
        num_inputs = None if self.speech is None else self.speech.num_inputs
        num_ready = self.num_tokens if num_inputs is None else min(num_inputs, self.num_tokens)
        if self.awaited_items:
            num_ready = min(num_ready, self._start_of_awaited())
        # The tokens of the prefix cache may be ahead of the text that has been read again, and may
        # end within an item.
        return max(0, num_ready - self.num_computed_tokens)

    def _start_of_awaited(self) -> int:
        """Return the first token that depends on an awaited item, apart from computed items."""
        first = self.num_tokens
        for item in (self.request.items[index] for index in self.awaited_items):
            start, length = item.placeholder.offset, item.placeholder.length
            if item.attended:
                return 0
            if start + length > self.num_computed_tokens:
                first = min(first, start)
        # The tokens of a span are computed in one step.
        return min([start for start, stop in self.spans if start < first < stop], default=first)

    @property
    def waits_for_input(self) -> bool:
        """Whether the next token depends on a text or an item that has not arrived."""
        may_wait = self.speech is not None or self.awaited_items
        return bool(may_wait) and self.num_computable_tokens == 0

    def round_to_spans(self, num_tokens: int, num_cached: int = 0) -> int:
        """Return a number of next tokens that ends in no span.

        A limit in a span becomes its start, or its end if no token comes before the span. The keys
        of a span depend on all its tokens, so these are computed in one step. Some of them may be
        cached, because the hash of a block covers the whole items in it.
        """
        begin = max(num_cached, self.num_computed_tokens)
        for start, stop in self.spans:
            if start < begin + num_tokens < stop:
                return (start if start > begin else stop) - begin
        return num_tokens

    def items_ahead(self, num_cached: int = 0) -> list[tuple[int, int]]:
        """Return starts and lengths of the items that uncomputed tokens begin and that a step must
        encode. Starts are counted from the first uncomputed token.

        `num_cached` tokens of a sequence that has not started count as computed.
        """
        if not self.request.items:
            return []
        num_computed = max(num_cached, self.num_computed_tokens)
        items = (
            item.placeholder
            for index, item in enumerate(self.request.items)
            if item.embedding is None and index not in self.awaited_items
        )
        ahead = ((item.offset - num_computed, item.length) for item in items)
        return [(start, length) for start, length in ahead if start >= 0]

    @property
    def begins_item(self) -> bool:
        """Whether the next token begins an item that a step must encode."""
        return any(start == 0 for start, _ in self.items_ahead())

    @property
    def pools_all_tokens(self) -> bool:
        """Whether the embedding needs the hidden states of all tokens."""
        return self.request.embedding is not None and self.pooling.mode == "mean"

    @property
    def can_read_prefix_cache(self) -> bool:
        """True if the sequence may use cached blocks, which yield no output for their tokens."""
        needs_all_rows = self.prompt_logprobs is not None or self.pools_all_tokens
        return not self.request.sampling.skip_reading_prefix_cache and not needs_all_rows


class ScheduledSequence:
    """Tokens [start, end) of a sequence in a step.

    They follow the computed tokens. `samples` is true if they include the last token of the
    sequence, so that a new token is sampled; an earlier chunk of a prefill samples none. Drafts may
    follow that token. Accepted drafts become part of the output, as if each had been sampled in a
    separate step.
    """

    __slots__ = (
        "copy",
        "draft_token_ids",
        "end",
        "num_new_tokens",
        "samples",
        "samples_token",
        "sequence",
        "start",
    )

    def __init__(
        self,
        sequence: Sequence,
        num_new_tokens: int,
        samples: bool,
        copy: tuple[int, int] | None = None,
        draft_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.sequence = sequence
        self.start = sequence.num_computed_tokens
        self.num_new_tokens = num_new_tokens
        """Number of the tokens, with the drafts."""
        self.end = self.start + num_new_tokens
        self.samples = samples
        self.samples_token = samples and sequence.samples_tokens
        """False at the end of a prompt that is only embedded."""
        self.copy = copy
        """(source, destination) of a block to be copied before the destination is written."""
        self.draft_token_ids = draft_token_ids

    @property
    def spans(self) -> list[Span]:
        """Spans that end within these tokens."""
        return [span for span in self.sequence.spans if self.start < span[1] <= self.end]


@dataclass(frozen=True, slots=True)
class Batch:
    """The work of one step; all blocks that it needs are in the sequences' block tables."""

    scheduled: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum([s.num_new_tokens for s in self.scheduled])

    def work(self, num_item_tokens: int = 0) -> StepWork:
        """Return the work of the step by kind, with the tokens of the items that were encoded."""
        num_prompt_tokens = sum(
            [
                s.num_new_tokens
                for s in self.scheduled
                if s.num_new_tokens > 1 and s.num_new_tokens > 1 + len(s.draft_token_ids)
            ]
        )
        return StepWork(self.num_tokens - num_prompt_tokens, num_prompt_tokens, num_item_tokens)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(source, destination) of all blocks to be copied before the step writes."""
        return [s.copy for s in self.scheduled if s.copy is not None]


@dataclass(slots=True)
class RequestOutput:
    """Output of one request after a step. The last one has `usage` or `error`."""

    request_id: str
    choices: list[ChoiceDelta]
    """New tokens. Unless `texts` is empty, they have no text yet."""
    texts: list[MakeText] = field(default_factory=list)
    """For each choice, the function with which `log_records.merge_deltas` makes its text: once for
    the tokens of a record, and not in each step. Empty if the text decides on the end of an answer,
    and if the request has none."""
    usage: Usage | None = None
    kv_blocks: int = 0
    """Peak number of KV blocks held; set together with `usage`."""
    error: PagemillError | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Prompt log probabilities; set once, with the first tokens."""
    embedding: bytes = b""
    """Embedding of the prompt, if one is requested; set together with `usage`."""
    kv: list[KVRun] = field(default_factory=list)
    """Full blocks of the prompt, if the request exports them; set together with `usage`."""

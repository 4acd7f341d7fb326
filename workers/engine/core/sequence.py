"""The nouns of the engine: a request, its sequences (one for each choice), and a batch of a step.

This module knows neither torch nor blocks' contents: token ids and counts only.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from shared.errors import PagemillError
from shared.protocol.messages import ChoiceDelta, TokenLogprobs, Usage
from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams


class Status(Enum):
    WAITING = "waiting"
    """Holds no blocks: new, or preempted and to be computed again."""
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Item:
    """A multimodal item as the runner encodes it; `fields` are torch tensors, or a fake's own.

    They may be views of somebody else's memory, which is given back when the item is collected.
    """

    modality: str
    mm_hash: str
    placeholder: PlaceholderRange
    fields: Mapping[str, Any]
    embedding: Any = None
    """What a tower elsewhere has made of it, [placeholder length, hidden_size]; `fields` are then
    its metadata only."""


@dataclass(frozen=True, slots=True)
class LoggedChoice:
    """What the token log already holds of one choice when a request is resumed."""

    token_ids: list[int]
    finished: bool


@dataclass(frozen=True, slots=True)
class EngineRequest:
    request_id: str
    prompt_token_ids: list[int]
    items: list[Item]
    sampling: SamplingParams
    logged: list[LoggedChoice] = field(default_factory=list)
    """One entry per choice on a resume, none on a first attempt."""
    lane: str = "interactive"
    tenant: str = ""
    """Nothing that was computed for one tenant is used for another."""
    adapter: str | None = None
    """Its keys and values are its own, too."""
    new_token_mask: "Callable[[], TokenMask] | None" = None
    """Of its grammar, if it has one; each choice has its own."""

    def items_within(self, start: int, stop: int) -> list[int]:
        """Indexes of the items that fill some of the tokens [start, stop)."""
        ranges = [item.placeholder for item in self.items]
        return [i for i, r in enumerate(ranges) if r.offset < stop and start < r.offset + r.length]


class TokenMask(Protocol):
    """Which tokens may follow in a choice, as a grammar has it; a function of its tokens so far."""

    def allowed(self) -> NDArray[np.int32] | None:
        """Token 32 * i + j may follow if bit j, from the lowest, of word i is set:
        [ceil(vocab_size / 32)]. None where all may. It is not changed before the next `advance`."""

    def advance(self, token_id: int) -> None:
        """The choice goes on with this token, sampled now or found in its log. Raises nothing:
        whatever is wrong shows in `allowed`, where only the one request fails by it."""


class Drafter(Protocol):
    """Drafts how one sequence goes on. What it says never changes an answer, only its speed."""

    def propose(self, token_ids: list[int], most: int) -> list[int]:
        """Up to so many tokens that may follow these; `token_ids` only grow from call to call."""

    def learn(self, num_drafts: int, num_accepted: int) -> None:
        """What has become of those that went through the model."""


class SampledToken(NamedTuple):
    token_id: int
    logprobs: TokenLogprobs | None = None
    """If the request asks for them."""


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice of one request."""

    request: EngineRequest
    choice: int
    seed: int
    token_ids: list[int]
    """Prompt and answer so far."""
    max_tokens: int
    end_token_ids: tuple[int, ...] = ()
    """What may not be chosen before `min_tokens`: the model's own ends and the stop tokens."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """As token ids."""
    token_mask: TokenMask | None = None
    drafter: Drafter | None = None
    prompt_logprobs: dict[int, TokenLogprobs] | None = None
    """By place in the prompt, as far as runs have come; None where nobody wants to know."""
    num_computed_tokens: int = 0
    """Tokens whose keys and values are in the cache."""
    block_table: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    turn: tuple[int, int] = (0, 0)
    """Its place in the scheduler's order."""
    num_sound_tokens: int = 0
    """Computed tokens behind which a token has been sampled since they were."""
    block_hashes: list[str] = field(default_factory=list)
    """Of its first blocks, as far as anybody has asked for them."""
    num_registered_blocks: int = 0
    """Blocks of its table, from the first on, that have been registered for others to find."""
    num_cached_tokens: int | None = None
    """Prompt tokens that were found in the cache when it was first admitted; None before."""

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def reads_prefix_cache(self) -> bool:
        """What is found is not computed, and yields no log probabilities of the prompt."""
        skips = self.request.sampling.skip_reading_prefix_cache
        return not skips and self.prompt_logprobs is None


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Tokens [num_computed_tokens, num_computed_tokens + num_new_tokens) go through the model.

    `samples` is true when they reach the last known token, so that a new one follows; a chunk of a
    prefill that stops short of it yields none. The last of them may be drafts behind that token:
    those that hold are part of the answer, as if each had been sampled in a step of its own.
    """

    sequence: Sequence
    num_new_tokens: int
    samples: bool
    copy: tuple[int, int] | None = None
    """A block, and one of its table that must hold the same before it is written."""
    draft_token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Batch:
    """One step's work; every block that its tokens need is in the sequences' block tables."""

    scheduled: list[ScheduledSequence]

    @property
    def num_tokens(self) -> int:
        return sum(s.num_new_tokens for s in self.scheduled)

    @property
    def copies(self) -> list[tuple[int, int]]:
        """Blocks to be copied before anything is written, and which ones to."""
        return [s.copy for s in self.scheduled if s.copy is not None]


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """News of one request after a step. The last one carries `usage` or `error`."""

    request_id: str
    choices: list[ChoiceDelta]
    usage: Usage | None = None
    kv_blocks: int = 0
    """The most blocks that the request held at one time; with `usage`."""
    error: PagemillError | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    """Once, with the first tokens."""

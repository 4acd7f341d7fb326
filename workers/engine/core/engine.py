"""The engine without its model: requests in, news of them out at each step.

One step is schedule, run, settle. A request that fails takes nothing of the others with it, and
whatever way it ends, its blocks go back to the pool and its embeddings are dropped. What blocks
hold, and embeddings by their content, may be found again by later requests of the same tenant.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from shared.errors import InvalidRequest, PagemillError, WorkerFailure
from shared.protocol.messages import ChoiceDelta
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.kv_events import KVEvents
from workers.engine.core.request_state import (
    ChoiceState,
    Decode,
    RequestFactory,
    RequestState,
    StopEvent,
)
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import (
    Batch,
    Drafter,
    EngineRequest,
    LoggedChoice,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    Sequence,
)


class StepRunner(Protocol):
    """What computes; it may keep things for a request from `prepare` to `release`."""

    encoded_items: int
    """How many items have been through the tower so far."""

    @property
    def mm_cache_queries(self) -> int:
        """How many items were looked up among the embeddings that are kept."""

    @property
    def mm_cache_hits(self) -> int: ...

    def prepare(self, request: EngineRequest) -> None:
        """Once before its first batch; raises what is wrong with the request."""

    def encode(self, request: EngineRequest, item_indexes: list[int]) -> None:
        """Have and keep the embeddings of these items, which the next batch needs."""

    def copy_blocks(self, copies: list[tuple[int, int]]) -> None:
        """Before the batch that needs it: (source, destination)."""

    def run(self, batch: Batch) -> list[list[SampledToken]]:
        """New tokens of each scheduled sequence, none where it does not sample. What it finds out
        about the prompts of others it notes there (`prompt_logprobs`)."""

    def release(self, request_id: str) -> None:
        """Drop what is kept for the request, if anything."""

    def scrub(self, blocks: list[int]) -> None:
        """Overwrite what a failed run has left in them, which may spoil what is masked later."""


@dataclass(frozen=True, slots=True)
class EngineStats:
    num_running: int
    num_waiting: int
    num_waiting_batch: int
    """Those of them in the slower lane."""
    num_free_blocks: int
    num_blocks: int
    prefix_query_tokens: int
    """Since the start, like all that follow: tokens that were looked up in the prefix cache."""
    prefix_hit_tokens: int
    prefix_evictions: int
    """Blocks that could have been found and were needed for something else."""
    num_preemptions: int
    num_draft_tokens: int
    num_accepted_tokens: int
    """Drafts that have become part of an answer."""
    kv_waste: float
    """Share of the slots in blocks that were held which had no token, over all steps."""
    encoded_items: int
    mm_cache_queries: int
    mm_cache_hits: int
    num_steps: int
    num_batched_tokens: int
    """That have gone through the model in these steps."""
    begun: tuple[str, ...]
    """Requests that have been in a batch for the first time in the last step."""


class EngineCore:
    def __init__(
        self,
        runner: StepRunner,
        tokenizer_decode: Decode,
        eos_token_ids: frozenset[int],
        *,
        pool: BlockPool,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        vocab_size: int,
        prefix_caching: bool = True,
        encode: Callable[[str], list[int]] = lambda text: [],
        new_drafter: Callable[[], Drafter | None] = lambda: None,
        max_drafting_tokens: int = 0,
    ) -> None:
        """`encode` and `new_drafter` are as in Intake."""
        self._runner = runner
        self._intake = RequestFactory(
            tokenizer_decode, encode, eos_token_ids, vocab_size, max_model_len, new_drafter
        )
        self._pool = pool
        self._scheduler = Scheduler(
            pool,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            prefix_caching,
            max_drafting_tokens,
        )
        self._entries: dict[str, RequestState] = {}
        self._news: dict[str, list[ChoiceDelta]] = {}
        """By request, for the end of the step."""
        self._num_steps = 0
        self._num_batched_tokens = 0
        self._begun: list[str] = []
        """Requests that the step has prepared."""

    @property
    def kv_events(self) -> KVEvents | None:
        """What becomes of blocks, if anybody is to be told; may be taken from any thread."""
        return self._pool.events

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._news)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_batch=self._scheduler.num_waiting_batch,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            prefix_query_tokens=self._scheduler.sharing.query_tokens,
            prefix_hit_tokens=self._scheduler.sharing.hit_tokens,
            prefix_evictions=self._pool.num_evictions,
            num_preemptions=self._scheduler.num_preemptions,
            num_draft_tokens=self._scheduler.num_draft_tokens,
            num_accepted_tokens=self._scheduler.num_accepted_tokens,
            kv_waste=self._scheduler.num_unused_slots / max(1, self._scheduler.num_slots),
            encoded_items=self._runner.encoded_items,
            mm_cache_queries=self._runner.mm_cache_queries,
            mm_cache_hits=self._runner.mm_cache_hits,
            num_steps=self._num_steps,
            num_batched_tokens=self._num_batched_tokens,
            begun=tuple(self._begun),
        )

    def add(self, request: EngineRequest) -> None:
        """Raises a RequestError for what could never run, and then keeps nothing of it."""
        if request.request_id in self._entries:
            raise InvalidRequest(f"request {request.request_id} is in hand", field="request_id")
        entry = self._intake.entry(request)
        logged = request.logged or [LoggedChoice([], False)] * request.sampling.n
        assert len(logged) == request.sampling.n
        endings = [
            choice.replay(log.token_ids) for choice, log in zip(entry.choices, logged, strict=True)
        ]
        self._entries[request.request_id] = entry
        for choice, log, ending in zip(entry.choices, logged, endings, strict=True):
            self._resume(choice, log, ending)
        if entry.finished:
            self._news.setdefault(request.request_id, [])

    def _resume(self, choice: ChoiceState, logged: LoggedChoice, ending: StopEvent | None) -> None:
        """Let what is left to do wait for its turn."""
        if logged.finished:
            choice.finished = True
        elif ending is not None:
            self._report(choice.sequence.request_id, choice.end(ending))
        else:
            self._scheduler.add(choice.sequence)

    def cancel(self, request_id: str) -> None:
        """Forget the request without a word; one that is not in hand has ended already."""
        self._begun = []
        if request_id in self._entries:
            self._drop(self._entries[request_id])

    def step(self) -> list[RequestOutput]:
        self._begun = []
        batch, failures = self._prepare(self._scheduler.schedule())
        self._num_steps += bool(batch.scheduled)
        self._num_batched_tokens += batch.num_tokens
        self._note_blocks(batch)
        try:
            sampled = self._run(batch) if batch.scheduled else []
        except Exception as error:
            failures += self._run_apart(batch, error)
        else:
            self._settle(batch, sampled)
        return failures + self._tell()

    # -- in a step --------------------------------------------------------------------------

    def _prepare(self, batch: Batch) -> tuple[Batch, list[RequestOutput]]:
        """See to all that the batch needs beside tokens; what fails at it leaves the batch."""
        failures = []
        for s in batch.scheduled:
            entry = self._entries.get(s.sequence.request_id)
            if entry is None:  # Another of its choices has failed.
                continue
            try:
                self._prepare_one(entry, s)
            except Exception as error:
                failures.append(self._fail(entry, _failure(error)))
        left = [s for s in batch.scheduled if s.sequence.request_id in self._entries]
        # Side by side, the sequences of an adapter go through it at once.
        left.sort(key=lambda s: s.sequence.request.adapter or "")
        return Batch(left), failures

    def _prepare_one(self, entry: RequestState, s: ScheduledSequence) -> None:
        if not entry.prepared:
            self._runner.prepare(entry.request)
            entry.prepared = True
            self._begun.append(entry.request.request_id)
        start = s.sequence.num_computed_tokens
        needed = entry.request.items_within(start, start + s.num_new_tokens)
        missing = [index for index in needed if index not in entry.encoded]
        if missing:
            self._runner.encode(entry.request, missing)
            entry.encoded.update(missing)
        if s.samples and s.sequence.token_mask is not None:
            # What is wrong with it is found before others have computed anything with it.
            s.sequence.token_mask.allowed()

    def _note_blocks(self, batch: Batch) -> None:
        for entry in self._entries_of(batch):
            (first, *others) = (choice.sequence.block_table for choice in entry.choices)
            # Choices share blocks; there is seldom more than one.
            num_blocks = len(entry.blocks) if others else len(first)
            entry.kv_blocks = max(entry.kv_blocks, num_blocks)

    def _run(self, batch: Batch) -> list[list[SampledToken]]:
        if unsound := self._scheduler.sharing.take_unsound():
            self._runner.scrub(unsound)
        if batch.copies:
            self._runner.copy_blocks(batch.copies)
        return self._runner.run(batch)

    def _settle(self, batch: Batch, sampled: list[list[SampledToken]]) -> None:
        choices = [self._choice_of(s) for s in batch.scheduled]
        for s, choice, tokens in zip(batch.scheduled, choices, sampled, strict=True):
            assert s.samples == bool(tokens)
            if tokens:
                self._take_prompt_logprobs(choice.sequence)
                self._report(s.sequence.request_id, choice.extend(tokens))
        self._scheduler.settle(batch)
        for choice in choices:
            if choice.finished:
                self._scheduler.remove(choice.sequence)

    def _take_prompt_logprobs(self, sequence: Sequence) -> None:
        """They are complete with the first token that is sampled."""
        found = sequence.prompt_logprobs
        if found is not None:
            places = range(1, sequence.num_prompt_tokens)
            entry = self._entries[sequence.request_id]
            entry.prompt_logprobs = [found[place] for place in places]
            sequence.prompt_logprobs = None

    def _report(self, request_id: str, delta: ChoiceDelta) -> None:
        self._news.setdefault(request_id, []).append(delta)

    def _tell(self) -> list[RequestOutput]:
        news, self._news = self._news, {}
        return [self._output(self._entries[request_id], news[request_id]) for request_id in news]

    def _output(self, entry: RequestState, deltas: list[ChoiceDelta]) -> RequestOutput:
        output = RequestOutput(
            entry.request.request_id, deltas, prompt_logprobs=entry.prompt_logprobs
        )
        entry.prompt_logprobs = None
        if not entry.finished:
            return output
        self._drop(entry)
        return replace(output, usage=entry.usage, kv_blocks=entry.kv_blocks)

    # -- ends -------------------------------------------------------------------------------

    def _run_apart(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """After a batch has failed: its halves, and so on down to the request that fails alone.

        A second run writes the same keys and values and draws the same random numbers.
        """
        entries = self._entries_of(batch)
        if len(entries) == 1:
            return [self._fail_alone(entries[0], error)]
        failures = []
        for half in (entries[: len(entries) // 2], entries[len(entries) // 2 :]):
            names = {entry.request.request_id for entry in half}
            part = Batch([s for s in batch.scheduled if s.sequence.request_id in names])
            try:
                sampled = self._run(part)
            except Exception as error_of_half:
                failures += self._run_apart(part, error_of_half)
            else:
                self._settle(part, sampled)
        return failures

    def _fail_alone(self, entry: RequestState, error: Exception) -> RequestOutput:
        blocks = entry.blocks
        self._pool.forget(blocks)
        failure = self._fail(entry, _failure(error))
        # Those that others hold as well were registered before this run, which has not written
        # them.
        self._runner.scrub([block for block in blocks if self._pool.ref_count(block) == 0])
        return failure

    def _fail(self, entry: RequestState, error: PagemillError) -> RequestOutput:
        request_id = entry.request.request_id
        deltas = self._news.get(request_id, [])
        self._drop(entry)
        return RequestOutput(request_id, deltas, error=error)

    def _drop(self, entry: RequestState) -> None:
        request_id = entry.request.request_id
        for choice in entry.choices:
            if not choice.finished:
                self._scheduler.remove(choice.sequence)
        self._runner.release(request_id)
        self._news.pop(request_id, None)
        del self._entries[request_id]

    # -- lookups ----------------------------------------------------------------------------

    def _entries_of(self, batch: Batch) -> list[RequestState]:
        """Each request of the batch once, in its order."""
        request_ids = dict.fromkeys(s.sequence.request_id for s in batch.scheduled)
        return [self._entries[request_id] for request_id in request_ids]

    def _choice_of(self, s: ScheduledSequence) -> ChoiceState:
        return self._entries[s.sequence.request_id].choices[s.sequence.choice]


def _failure(error: Exception) -> PagemillError:
    if isinstance(error, PagemillError):
        return error
    # What went wrong is for the log and the dead letter; it may name paths and addresses.
    failure = WorkerFailure("the engine failed on this request")
    failure.__cause__ = error
    return failure

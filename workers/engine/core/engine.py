"""Engine core, independent of the model: takes requests and returns their outputs step by step.

A step schedules a batch, runs it and processes the sampled tokens. A failing request does not
affect the others. However a request ends, its blocks return to the pool and its embeddings are
dropped. Later requests of the same tenant can still find block contents in the prefix cache, and
embeddings by their content hash.
"""

from collections.abc import Callable
from dataclasses import replace

from shared.errors import InvalidRequest, OutOfMemory, PagemillError, WorkerFailure
from shared.helpers.device_errors import is_device_lost
from shared.protocol.records import ChoiceDelta
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.kv_events import KVEvents
from workers.engine.core.kv_exchange import KVExchange, KVMemory
from workers.engine.core.request_state import Decode, RequestFactory, RequestState
from workers.engine.core.scheduler import Scheduler
from workers.engine.core.sequence import (
    LAST_TOKEN,
    Batch,
    Drafter,
    EngineRequest,
    LoggedChoice,
    Pooling,
    RequestOutput,
    SampledToken,
    ScheduledSequence,
    Sequence,
    SpokenText,
    TokenMask,
)
from workers.engine.core.step_cost import UNLIMITED, PrefillLimit, StepWork
from workers.engine.core.step_runner import StepRunner


class EngineCore:
    """Runs requests to completion, one step at a time. Not thread-safe."""

    _num_steps = 0
    _num_batched_tokens = 0
    _num_item_tokens = 0
    """Tokens of the items that the last step encoded."""

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
        prefill_limit: PrefillLimit = UNLIMITED,
        interactive_slowdown: float = 1.25,
        pooling: Pooling = LAST_TOKEN,
        kv_memory: KVMemory | None = None,
        keeps_states: bool = False,
        new_rules: Callable[[EngineRequest], TokenMask | None] = lambda request: None,
    ) -> None:
        """For `encode`, `new_drafter`, `pooling` and `new_rules` see `RequestFactory`.

        With `kv_memory`, blocks are exchanged with other engines. If the model `keeps_states`,
        sequences do not share prefixes.
        """
        self._runner = runner
        self._factory = RequestFactory(
            decode=tokenizer_decode,
            encode=encode,
            eos_token_ids=eos_token_ids,
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            new_drafter=new_drafter,
            check=runner.check,
            find_spans=runner.spans_of,
            pooling=pooling,
            new_rules=new_rules,
        )
        self._pool = pool
        self._scheduler = Scheduler(
            pool,
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            prefix_caching,
            max_drafting_tokens,
            prefill_limit,
            interactive_slowdown,
            keeps_states,
        )
        self.kv_exchange = KVExchange(pool, self._scheduler, runner, kv_memory)
        self._requests: dict[str, RequestState] = {}
        self._deltas: dict[str, list[ChoiceDelta]] = {}
        """Deltas of this step by request id, returned at its end."""
        self._last_work = StepWork()
        self._first_scheduled: list[str] = []
        """Requests that were prepared in the last step."""

    @property
    def kv_events(self) -> KVEvents | None:
        """KV cache events, or None if disabled. They may be taken in any thread."""
        return self._pool.events

    @property
    def has_work(self) -> bool:
        return self._scheduler.has_work or bool(self._deltas)

    def stats(self) -> EngineStats:
        return EngineStats(
            num_running=self._scheduler.num_running,
            num_waiting=self._scheduler.num_waiting,
            num_waiting_batch=self._scheduler.num_waiting_batch,
            num_without_input=self._scheduler.num_without_input,
            num_free_blocks=self._pool.num_free,
            num_blocks=self._pool.num_blocks,
            prefix_query_tokens=self._scheduler.prefix_cache.query_tokens,
            prefix_hit_tokens=self._scheduler.prefix_cache.hit_tokens,
            prefix_evictions=self._pool.num_evictions,
            num_preemptions=self._scheduler.num_preemptions,
            memory_shortages=self._scheduler.shortage.counts.copy(),
            num_draft_tokens=self._scheduler.num_draft_tokens,
            num_accepted_tokens=self._scheduler.num_accepted_tokens,
            kv_waste=self._scheduler.num_unused_slots / max(1, self._scheduler.num_slots),
            encoded_items=self._runner.encoded_items,
            mm_cache_queries=self._runner.mm_cache_queries,
            mm_cache_hits=self._runner.mm_cache_hits,
            num_steps=self._num_steps,
            num_batched_tokens=self._num_batched_tokens,
            first_scheduled=tuple(self._first_scheduled),
        )

    def add(self, request: EngineRequest) -> None:
        """Add a request to the waiting queue.

        Raises a RequestError, and stores nothing, for a request that could never run.
        """
        if request.request_id in self._requests:
            raise InvalidRequest(
                f"request {request.request_id} is already running", field="request_id"
            )
        state = self._factory.create(request)
        logged = request.logged or [LoggedChoice([], False)] * request.sampling.n
        assert len(logged) == request.sampling.n
        stop_events = [
            choice.replay(log) for choice, log in zip(state.choices, logged, strict=True)
        ]
        self._requests[request.request_id] = state
        for choice, log, stop_event in zip(state.choices, logged, stop_events, strict=True):
            if log.finished:
                choice.finished = True
            elif stop_event is not None:  # The end is not in the log yet.
                self._add_delta(request.request_id, choice.finish_replayed(stop_event))
            else:
                self._scheduler.add(choice.sequence)
        if state.finished:
            self._deltas.setdefault(request.request_id, [])

    def extend_speech(self, request_id: str, speech: SpokenText) -> None:
        """Give a talker more of its text. Does nothing if the request has ended."""
        if (state := self._requests.get(request_id)) is not None:
            for choice in state.choices:
                choice.sequence.speech = speech

    def cancel(self, request_id: str) -> None:
        """Drop the request without an output. Does nothing if the request has already ended."""
        self._first_scheduled = []
        if request_id in self._requests:
            self._remove(self._requests[request_id])

    def step(self) -> list[RequestOutput]:
        """Run one step and return the outputs of all requests that it changed.

        An error of a request ends this request alone. Raises the error of a device that is lost:
        every later request would fail as well.
        """
        self._first_scheduled = []
        self.kv_exchange.restore()
        self._num_item_tokens = 0
        batch, failures = self._prepare_batch(self._scheduler.schedule())
        self._last_work = batch.work(self._num_item_tokens)
        self._num_steps += bool(batch.scheduled)
        self._num_batched_tokens += batch.num_tokens
        self._record_kv_blocks(batch)
        try:
            sampled = self._run_batch(batch) if batch.scheduled else []
        except Exception as error:
            if self._runner.recover_memory(error):
                failures += self._shrink_steps(batch, error)
            else:
                failures += self._bisect_batch(batch, error)
        else:
            self._process_sampled(batch, sampled)
        return failures + self._take_outputs()

    def observe_time(self, seconds: float) -> None:
        """Record the duration of the last step; limits on later steps are derived from it."""
        if self._last_work.num_tokens:
            self._scheduler.observe(self._last_work, seconds)

    # -- step -------------------------------------------------------------------------------

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, list[RequestOutput]]:
        """Prepare requests and encode items; requests that fail are removed from the batch."""
        failures = []
        missing: dict[str, set[int]] = {}
        for s in batch.scheduled:
            state = self._requests.get(s.sequence.request_id)
            if state is None:  # Another choice of the request has failed.
                continue
            try:
                self._prepare_sequence(state, s)
            except Exception as error:
                failures.append(self._fail(state, error_of_request(error)))
                missing.pop(state.request.request_id, None)
            else:
                if indexes := _missing_items(state, s):
                    missing.setdefault(state.request.request_id, set()).update(indexes)
        failures += self._encode_items(missing)
        remaining = [s for s in batch.scheduled if s.sequence.request_id in self._requests]
        # Adjacent sequences of one adapter go through it in one product.
        remaining.sort(key=lambda s: s.sequence.request.adapter or "")
        return Batch(remaining), failures

    def _prepare_sequence(self, state: RequestState, s: ScheduledSequence) -> None:
        if not state.prepared:
            self._runner.prepare(state.request)
            state.prepared = True
            self._first_scheduled.append(state.request.request_id)
        if s.samples and s.sequence.token_mask is not None:
            # An invalid grammar fails here, before it can fail the batch of other requests.
            s.sequence.token_mask.allowed()

    def _encode_items(self, missing: dict[str, set[int]]) -> list[RequestOutput]:
        """Encode items by the indexes in their requests: in one call, or each request alone if that
        fails."""
        if not missing:
            return []
        states = [self._requests[request_id] for request_id in missing]
        try:
            self._num_item_tokens += self._runner.encode(
                [(state.request, sorted(missing[state.request.request_id])) for state in states]
            )
        except Exception as error:
            if self._runner.recover_memory(error):
                error = out_of_memory(error)
            reported = error_of_request(error)
            if len(states) == 1:
                return [self._fail(states[0], reported)]
            alone = ({request_id: indexes} for request_id, indexes in missing.items())
            return [failure for each in alone for failure in self._encode_items(each)]
        for state in states:
            state.encoded.update(missing[state.request.request_id])
        return []

    def _record_kv_blocks(self, batch: Batch) -> None:
        """Update the peak number of blocks of each request."""
        for state in self._requests_of(batch):
            (first, *others) = (choice.sequence.block_table for choice in state.choices)
            # Only several choices share blocks, so one choice needs no set of them.
            num_blocks = len(state.blocks) if others else len(first)
            state.kv_blocks = max(state.kv_blocks, num_blocks)

    def _run_batch(self, batch: Batch) -> list[list[SampledToken]]:
        if unverified := self._scheduler.prefix_cache.take_unverified_blocks():
            self._runner.zero_blocks(unverified)
        if batch.copies:
            self._runner.copy_blocks(batch.copies)
        return self._runner.run(batch)

    def _process_sampled(self, batch: Batch, sampled: list[list[SampledToken]]) -> None:
        choices = [
            self._requests[s.sequence.request_id].choices[s.sequence.choice]
            for s in batch.scheduled
        ]
        for s, choice, tokens in zip(batch.scheduled, choices, sampled, strict=True):
            assert bool(tokens) == (s.samples and s.sequence.samples_tokens)
            if s.samples and not s.sequence.samples_tokens:
                choice.finished = True
                self._deltas.setdefault(s.sequence.request_id, [])
            if tokens:
                self._collect_prompt_logprobs(choice.sequence)
                self._add_delta(s.sequence.request_id, choice.append_sampled(tokens))
        self._scheduler.update_after_step(batch)
        for choice in choices:
            if choice.finished:
                self._scheduler.remove(choice.sequence)

    def _collect_prompt_logprobs(self, sequence: Sequence) -> None:
        """Move the prompt's log probabilities to the request: the first sample completes them."""
        logprobs = sequence.prompt_logprobs
        if logprobs is not None:
            positions = range(1, sequence.num_prompt_tokens)
            state = self._requests[sequence.request_id]
            state.prompt_logprobs = [logprobs[position] for position in positions]
            sequence.prompt_logprobs = None

    def _add_delta(self, request_id: str, delta: ChoiceDelta) -> None:
        self._deltas.setdefault(request_id, []).append(delta)

    def _take_outputs(self) -> list[RequestOutput]:
        deltas_of, self._deltas = self._deltas, {}
        return [
            self._make_output(self._requests[request_id], deltas_of[request_id])
            for request_id in deltas_of
        ]

    def _make_output(self, state: RequestState, deltas: list[ChoiceDelta]) -> RequestOutput:
        output = RequestOutput(
            state.request.request_id, deltas, prompt_logprobs=state.prompt_logprobs
        )
        state.prompt_logprobs = None
        if not state.finished:
            return output
        self._remove(state)
        sequence = state.choices[0].sequence
        kv, embedding = self.kv_exchange.export(sequence), sequence.embedding
        return replace(
            output, usage=state.usage, kv_blocks=state.kv_blocks, embedding=embedding, kv=kv
        )

    # -- failures and removal ----------------------------------------------------------------

    def _bisect_batch(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Rerun the halves of a failed batch, recursively, to find the requests that fail alone.

        Rerunning is safe: it writes the same keys and values and draws the same random numbers, and
        a failed step changes no states.
        """
        states, reported = self._requests_of(batch), error_of_request(error)
        if len(states) == 1:
            return [self._fail_isolated(states[0], reported)]
        failures = []
        for half in (states[: len(states) // 2], states[len(states) // 2 :]):
            request_ids = {state.request.request_id for state in half}
            part = Batch([s for s in batch.scheduled if s.sequence.request_id in request_ids])
            try:
                sampled = self._run_batch(part)
            except Exception as error_of_half:
                failures += self._bisect_batch(part, error_of_half)
            else:
                self._process_sampled(part, sampled)
        return failures

    def _shrink_steps(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Drop a batch for which the device has too little memory, and make later steps smaller."""
        self._last_work = StepWork()
        action = self._scheduler.shortage.react(batch)
        if action == "fail":
            (state,) = self._requests_of(batch)
            return [self._fail_isolated(state, out_of_memory(error))]
        self._scheduler.drop(batch, preempt_last=action == "preempt")
        return []

    def _fail_isolated(self, state: RequestState, error: PagemillError) -> RequestOutput:
        blocks = state.blocks
        self._pool.unregister(blocks)
        failure = self._fail(state, error)
        # Blocks that other requests hold too were registered before this run, which did not write
        # them.
        self._runner.zero_blocks([block for block in blocks if self._pool.ref_count(block) == 0])
        return failure

    def _fail(self, state: RequestState, error: PagemillError) -> RequestOutput:
        request_id = state.request.request_id
        deltas = self._deltas.get(request_id, [])
        self._remove(state)
        return RequestOutput(request_id, deltas, error=error)

    def _remove(self, state: RequestState) -> None:
        request_id = state.request.request_id
        for choice in state.choices:
            if not choice.finished:
                self._scheduler.remove(choice.sequence)
        self._runner.release(request_id)
        self._deltas.pop(request_id, None)
        del self._requests[request_id]

    # -- lookups ----------------------------------------------------------------------------

    def _requests_of(self, batch: Batch) -> list[RequestState]:
        """Return each request of the batch once, in batch order."""
        request_ids = dict.fromkeys(s.sequence.request_id for s in batch.scheduled)
        return [self._requests[request_id] for request_id in request_ids]


def _missing_items(state: RequestState, s: ScheduledSequence) -> list[int]:
    """Return the indexes of the items that the tokens depend on and that are not encoded yet."""
    start = s.sequence.num_computed_tokens
    needed = state.request.items_within(start, start + s.num_new_tokens)
    return [index for index in needed if index not in state.encoded]


def out_of_memory(error: Exception) -> OutOfMemory:
    """Return the error to report for a request that needs more memory than the device has."""
    failure = OutOfMemory("the device of the engine has too little memory for this request alone")
    failure.__cause__ = error
    return failure


def error_of_request(error: Exception) -> PagemillError:
    """Return the error to report for a request: a WorkerFailure in place of unknown errors.

    Raises the error of a device that is lost.
    """
    if is_device_lost(error):
        raise error
    if isinstance(error, PagemillError):
        return error
    # The cause goes to the log and the dead letter only: it may name paths and addresses.
    failure = WorkerFailure("the engine failed on this request")
    failure.__cause__ = error
    return failure

"""Engine core, independent of the model: takes requests and returns their outputs step by step.

A step schedules a batch, launches its forward pass, samples it and processes the tokens. A core
that runs ahead schedules and launches the next step before it waits for the tokens, so that a
device computes while the host works.

A failing request does not affect the others. However a request ends, its blocks return to the pool
and its embeddings are dropped. Later requests of the same tenant can still find block contents in
the prefix cache, and embeddings by their content hash.
"""

from collections.abc import Callable
from typing import Any

from shared.errors import InvalidRequest, PagemillError
from shared.protocol.records import ChoiceDelta
from workers.engine.core.batch_preparation import BatchPreparation
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.kv_events import KVEvents
from workers.engine.core.kv_exchange import KVExchange, KVMemory
from workers.engine.core.request_errors import error_of_request, out_of_memory
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
    Status,
    TokenMask,
)
from workers.engine.core.step_cost import UNLIMITED, PrefillLimit, StepWork
from workers.engine.core.step_in_flight import StepInFlight
from workers.engine.core.step_runner import StepRunner


class EngineCore:
    """Runs requests to completion, one step at a time. Not thread-safe."""

    _num_steps = 0
    _num_batched_tokens = 0
    _last_work = StepWork()
    _ahead: StepInFlight | None = None
    """Next step, if it has been launched."""
    _is_repeating = False
    """Whether the last steps in flight were dropped because of an error."""

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
        runs_ahead: bool = False,
    ) -> None:
        """For `encode`, `new_drafter`, `pooling` and `new_rules` see `RequestFactory`.

        With `kv_memory`, blocks are exchanged with other engines. If the model `keeps_states`,
        sequences do not share prefixes. If the core `runs_ahead`, the forward pass of a step is
        launched before the results of the step before it are awaited, where that is possible.
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
        self._preparation = BatchPreparation(runner, self._requests)
        self._runs_ahead = runs_ahead
        self._deltas: dict[str, list[ChoiceDelta]] = {}
        """Deltas of this step by request id, returned at its end."""

    @property
    def kv_events(self) -> KVEvents | None:
        """KV cache events, or None if disabled. They may be taken in any thread."""
        return self._pool.events

    @property
    def has_work(self) -> bool:
        is_changed = bool(self._deltas) or self._preparation.has_failed
        return self._scheduler.has_work or self._ahead is not None or is_changed

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
            prompt_tokens_per_s=self._scheduler.prompt_tokens_per_s,
            first_scheduled=tuple(self._preparation.first_scheduled),
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
                delta = choice.finish_replayed(stop_event)
                self._deltas.setdefault(request.request_id, []).append(delta)
            else:
                self._scheduler.add(choice.sequence)
        if state.finished:
            self._deltas.setdefault(request.request_id, [])
        elif request.items:
            self._begin_encoding(state)

    def _begin_encoding(self, state: RequestState) -> None:
        """Let the tower thread, if there is one, encode the items after the cached prefix.

        Steps encode the items that they miss later, for example after a preemption.
        """
        request = state.request
        sequences = [choice.sequence for choice in state.choices if not choice.finished]
        num_cached = self._scheduler.prefix_cache.match_prefix(sequences[0]).num_tokens
        if request.received is not None:
            num_restored = request.received.num_blocks * self._pool.block_size
            num_cached = max(num_cached, num_restored)
        needed = request.items_within(num_cached, sequences[0].num_tokens)
        state.awaited |= self._runner.begin_encoding(request, needed)
        for sequence in sequences:
            sequence.awaited_items = state.awaited

    def take_embedding(self, request_id: str, mm_hash: str, embedding: Any) -> None:
        """Give a request the embedding of an item for which it waits, or the tower's error.

        Does nothing if the request has ended, or does not wait for the item. Raises the error of a
        device that is lost.
        """
        if (state := self._requests.get(request_id)) is None:
            return
        items = state.request.items
        indexes = [index for index in state.awaited if items[index].mm_hash == mm_hash]
        if indexes and isinstance(embedding, Exception):
            self._preparation.fail_encoding(state, embedding)
            return
        for index in indexes:
            self._runner.take_embedding(items[index], embedding)
            state.awaited.discard(index)

    def extend_speech(self, request_id: str, speech: SpokenText) -> None:
        """Give a talker more of its text. Does nothing if the request has ended."""
        if (state := self._requests.get(request_id)) is not None:
            for choice in state.choices:
                choice.sequence.speech = speech

    def cancel(self, request_id: str) -> None:
        """Drop the request without an output. Does nothing if the request has already ended."""
        self._preparation.first_scheduled = []
        if request_id in self._requests:
            self._remove(self._requests[request_id])

    def step(self) -> list[RequestOutput]:
        """Finish the next step and return the outputs of all requests that it changed.

        The step may have been launched by the last call, and this call may launch the step after
        it. Only the forward pass runs ahead: a step is sampled when all tokens before it are known.

        An error of a request ends this request alone. Raises the error of a device that is lost:
        every later request would fail as well.
        """
        self._preparation.first_scheduled = []
        self.kv_exchange.restore()
        is_ahead = self._ahead is not None
        step, self._ahead = self._ahead or self._launch(), None
        failures = [] if step is None else self._finish(step, is_ahead)
        for state, error in self._preparation.take_failed():
            if self._requests.get(state.request.request_id) is state:
                failures.append(self._fail(state, error))
        return failures + self._take_outputs()

    def observe_time(self, seconds: float) -> None:
        """Record the duration of the last step; limits on later steps are derived from it."""
        if self._last_work.num_tokens:
            self._scheduler.observe(self._last_work, seconds)

    # -- step -------------------------------------------------------------------------------

    def _launch(self) -> StepInFlight | None:
        """Schedule and launch the next step. Requests that cannot be prepared have no part in it.

        Returns None if nothing can be computed.
        """
        batch, num_item_tokens = self._preparation.prepare(self._scheduler.schedule())
        if not batch.scheduled:
            return None
        return self._launch_batch(batch, batch.work(num_item_tokens))

    def _launch_batch(self, batch: Batch, work: StepWork) -> StepInFlight:
        unverified = self._scheduler.prefix_cache.take_unverified_blocks()
        return StepInFlight(self._runner, batch, unverified, work)

    def _finish(self, step: StepInFlight, is_ahead: bool) -> list[RequestOutput]:
        """Sample a step, without the sequences that have ended since it was launched, and process
        its tokens. The next step is launched in between, if possible."""
        failures = self._check_masks(step.batch)
        scheduled = step.batch.scheduled
        running = [i for i, s in enumerate(scheduled) if s.sequence.status is Status.RUNNING]
        if not running:
            return failures
        batch = (
            step.batch if len(running) == len(scheduled) else Batch([scheduled[i] for i in running])
        )
        self._last_work = step.work
        self._num_steps += 1
        self._num_batched_tokens += step.work.num_tokens
        self._record_kv_blocks(batch)
        step.sample(running)
        can_look_ahead = self._runs_ahead and not self._is_repeating and step.error is None
        if can_look_ahead and self._scheduler.can_look_ahead:
            with self._scheduler.looking_ahead(batch):
                self._ahead = self._launch()
        self._is_repeating = False
        try:
            sampled = step.result()
        except Exception as error:
            has_no_memory = self._runner.recover_memory(error)
            if is_ahead or self._ahead is not None:
                self._drop(step, error)
            elif has_no_memory:
                failures += self._shrink_steps(batch, error)
            else:
                failures += self._bisect_batch(batch, error)
        else:
            self._process_sampled(batch, sampled)
        return failures

    def _drop(self, step: StepInFlight, error: Exception) -> None:
        """Drop all steps in flight, because this one has failed. Its sequences are scheduled again.

        No step runs ahead of the next one. If the next batch fails too, its requests may fail.
        Raises the error of a device that is lost.
        """
        error_of_request(error)
        for dropped in (step, self._ahead):
            if dropped is not None:
                self._scheduler.drop(dropped.batch)
        self._ahead = None
        self._is_repeating = True
        self._last_work = StepWork()

    def _check_masks(self, batch: Batch) -> list[RequestOutput]:
        """Fail requests with an invalid grammar here, before they can fail the whole batch."""
        failures = []
        for s in batch.scheduled:
            mask, is_running = s.sequence.token_mask, s.sequence.status is Status.RUNNING
            if mask is not None and s.samples_token and is_running:
                try:
                    mask.allowed()
                except Exception as error:
                    state = self._requests[s.sequence.request_id]
                    failures.append(self._fail(state, error_of_request(error)))
        return failures

    def _record_kv_blocks(self, batch: Batch) -> None:
        """Update the peak number of blocks of each request with several choices."""
        shared = [s for s in batch.scheduled if s.sequence.request.sampling.n > 1]
        for state in self._requests_of(shared):
            state.kv_blocks = max(state.kv_blocks, len(state.blocks))

    def _process_sampled(self, batch: Batch, sampled: list[list[SampledToken]]) -> None:
        finished, requests, deltas_of = [], self._requests, self._deltas
        for s, tokens in zip(batch.scheduled, sampled, strict=True):
            sequence = s.sequence
            request_id = sequence.request_id
            choice = requests[request_id].choices[sequence.choice]
            if tokens:
                if sequence.prompt_logprobs is not None:
                    self._collect_prompt_logprobs(sequence)
                delta = choice.append_sampled(tokens)
                if request_id in deltas_of:
                    deltas_of[request_id].append(delta)
                else:
                    deltas_of[request_id] = [delta]
            else:
                assert not s.samples_token
                if s.samples:
                    choice.finished = True
                    deltas_of.setdefault(request_id, [])
            if choice.finished:
                finished.append(sequence)
        self._scheduler.update_after_step(batch)
        for sequence in finished:
            self._scheduler.remove(sequence)

    def _collect_prompt_logprobs(self, sequence: Sequence) -> None:
        """Move the prompt's log probabilities to the request: the first sample completes them."""
        logprobs = sequence.prompt_logprobs
        assert logprobs is not None
        positions = range(1, sequence.num_prompt_tokens)
        state = self._requests[sequence.request_id]
        state.prompt_logprobs = [logprobs[position] for position in positions]
        sequence.prompt_logprobs = None

    def _take_outputs(self) -> list[RequestOutput]:
        deltas_of, self._deltas = self._deltas, {}
        outputs = []
        for request_id, deltas in deltas_of.items():
            state = self._requests[request_id]
            if deltas and deltas[-1].finish_reason is None and state.prompt_logprobs is None:
                # The choice of the last delta has not ended.
                outputs.append(RequestOutput(request_id, deltas, state.texts))
            else:
                outputs.append(self._make_output(state, deltas))
        return outputs

    def _make_output(self, state: RequestState, deltas: list[ChoiceDelta]) -> RequestOutput:
        """Return an output that may be the last one, or have the prompt's log probabilities."""
        output = RequestOutput(
            state.request.request_id, deltas, state.texts, prompt_logprobs=state.prompt_logprobs
        )
        state.prompt_logprobs = None
        if state.finished:
            self._remove(state)
            sequence = state.choices[0].sequence
            output.usage = state.usage
            output.kv_blocks = state.kv_blocks or sequence.peak_blocks
            output.embedding = sequence.embedding
            output.kv = self.kv_exchange.export(sequence)
        return output

    # -- failures and removal ----------------------------------------------------------------

    def _bisect_batch(self, batch: Batch, error: Exception) -> list[RequestOutput]:
        """Rerun the halves of a failed batch, recursively, to find the requests that fail alone.

        Rerunning is safe: it writes the same keys and values and draws the same random numbers, and
        a failed step changes no states.
        """
        states, reported = self._requests_of(batch.scheduled), error_of_request(error)
        if len(states) == 1:
            return [self._fail_isolated(states[0], reported)]
        failures = []
        for half in (states[: len(states) // 2], states[len(states) // 2 :]):
            request_ids = {state.request.request_id for state in half}
            part = Batch([s for s in batch.scheduled if s.sequence.request_id in request_ids])
            try:
                step = self._launch_batch(part, StepWork())
                step.sample(range(len(part.scheduled)))
                sampled = step.result()
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
            (state,) = self._requests_of(batch.scheduled)
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
        return RequestOutput(request_id, deltas, state.texts, error=error)

    def _remove(self, state: RequestState) -> None:
        request_id = state.request.request_id
        for choice in state.choices:
            if not choice.finished:
                self._scheduler.remove(choice.sequence)
        self._runner.release(request_id)
        self._deltas.pop(request_id, None)
        del self._requests[request_id]

    # -- lookups ----------------------------------------------------------------------------

    def _requests_of(self, scheduled: list[ScheduledSequence]) -> list[RequestState]:
        """Return each request of the sequences once, in their order."""
        request_ids = dict.fromkeys([s.sequence.request_id for s in scheduled])
        return [self._requests[request_id] for request_id in request_ids]

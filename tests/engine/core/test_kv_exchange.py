"""Blocks of another engine: found like cached ones, and never in the way of computing the prompt.

The fake runner verifies every slot of a sequence before each sample, so a wrong block fails.
"""

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.fakes import CONTENT_BYTES, FakeRunner
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.kv_events import BlockStored, KVEvents
from workers.engine.core.kv_exchange import NotWritten
from workers.engine.core.sequence import (
    EngineRequest,
    Item,
    KVRun,
    LoggedChoice,
    ReceivedKV,
    RequestOutput,
)

BLOCK_SIZE, VOCAB_SIZE, NUM_BLOCKS = 2, 50, 64
RUN_BYTES = 3 * BLOCK_SIZE * CONTENT_BYTES
IMAGE = Item("image", "ab" * 32, PlaceholderRange(3, 4), {})


class Engine:
    def __init__(self, seed: int = 0, num_blocks: int = NUM_BLOCKS) -> None:
        self.runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
        self.events = KVEvents()
        order = random.Random(seed).sample(range(num_blocks), num_blocks)
        self.pool = BlockPool(num_blocks, BLOCK_SIZE, order, self.events)
        self.core = make_core(
            self.runner,
            self.pool,
            VOCAB_SIZE,
            max_num_batched_tokens=16,
            max_model_len=2 * num_blocks,
            kv_memory=self.runner,
        )

    def run(self, request: EngineRequest) -> list[RequestOutput]:
        outputs = []
        self.core.add(request)
        while self.core.has_work:
            outputs += self.core.step()
        self.pool.check_integrity()
        assert self.pool.num_free == self.pool.num_blocks
        assert all(output.error is None for output in outputs)
        return outputs

    def num_prefilled(self, request: EngineRequest) -> int:
        """Run a request and return the number of its prompt tokens that were computed."""
        before = self.core.stats().prefix_hit_tokens
        self.run(request)
        num_hits = self.core.stats().prefix_hit_tokens - before
        return len(request.prompt_token_ids) - num_hits


def request_of(
    num_tokens: int = 21, n: int = 1, tenant: str = "", items: tuple[Item, ...] = ()
) -> EngineRequest:
    token_ids = random.Random(num_tokens).choices(range(VOCAB_SIZE), k=num_tokens)
    sampling = SamplingParams(max_tokens=9, n=n, ignore_eos=True)
    return EngineRequest("r", token_ids, list(items), sampling, tenant=tenant)


def prefilled(request: EngineRequest, engine: Engine | None = None) -> list[KVRun]:
    """Compute the prompt in another engine and return its blocks."""
    one_token = SamplingParams(max_tokens=1, temperature=0)
    outputs = (engine or Engine(seed=7)).run(
        replace(request, sampling=one_token, export_run_bytes=RUN_BYTES)
    )
    return outputs[-1].kv


def received(request: EngineRequest, runs: list[KVRun]) -> EngineRequest:
    return replace(request, received=ReceivedKV(runs))


def tokens_of(outputs: list[RequestOutput]) -> list[tuple[int, list[int]]]:
    return [(delta.index, delta.token_ids) for output in outputs for delta in output.choices]


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("items", [(), (IMAGE,)])
def test_restored_blocks_are_not_computed_and_yield_the_same_tokens(
    n: int, items: tuple[Item, ...]
) -> None:
    request = request_of(n=n, items=items)
    engine = Engine(seed=1)
    outputs = engine.run(received(request, prefilled(request)))
    expected = Engine(seed=2).run(request)
    by_choice = {i: [t for j, ts in tokens_of(outputs) if j == i for t in ts] for i in range(n)}
    token_ids = {i: [t for j, ts in tokens_of(expected) if j == i for t in ts] for i in range(n)}
    assert by_choice == token_ids
    usage = outputs[-1].usage
    assert usage is not None
    assert usage.cached_tokens == 20


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 20, 21, 22])
def test_the_last_token_is_always_computed(num_tokens: int) -> None:
    request = request_of(num_tokens)
    runs = prefilled(request)
    assert sum(len(run.hashes) for run in runs) == (num_tokens - 1) // BLOCK_SIZE
    computed = Engine().num_prefilled(received(request, runs))
    assert computed == num_tokens - (num_tokens - 1) // BLOCK_SIZE * BLOCK_SIZE


def test_blocks_are_exported_in_runs_of_the_given_size() -> None:
    assert [(run.first, len(run.hashes)) for run in prefilled(request_of())] == [
        (0, 3),
        (3, 3),
        (6, 3),
        (9, 1),
    ]
    assert Engine().run(request_of())[-1].kv == []


@given(num_cached=st.integers(0, 21), gap=st.integers(0, 4), num_runs=st.integers(0, 4))
def test_blocks_continue_what_is_cached_already(num_cached: int, gap: int, num_runs: int) -> None:
    """A part of the prompt may be cached, and the first runs may be left out for it."""
    request, engine = request_of(), Engine(seed=1)
    if num_cached:
        beginning = request.prompt_token_ids[:num_cached]
        engine.run(replace(request, request_id="before", prompt_token_ids=beginning))
    exchange = engine.core.kv_exchange
    cached_blocks = exchange.num_cached(exchange.prompt_hashes(request))
    runs = prefilled(request)[gap:][:num_runs]
    stop = runs[-1].first + len(runs[-1].hashes) if runs else 0
    reachable = stop if runs and runs[0].first <= cached_blocks else 0
    computed = engine.num_prefilled(received(request, runs))
    assert computed == 21 - BLOCK_SIZE * max(cached_blocks, reachable)


def test_blocks_of_another_prompt_or_tenant_are_not_used() -> None:
    runs = prefilled(request_of(tenant="a"))
    for other in (request_of(tenant="b"), request_of(20, tenant="a")):
        assert Engine().num_prefilled(received(other, runs)) == len(other.prompt_token_ids)


def test_blocks_of_another_size_are_not_used() -> None:
    request = request_of()
    (first, *others) = prefilled(request)
    short = replace(first, data=(first.data[0][:-1], *first.data[1:]))
    assert Engine().num_prefilled(received(request, [short, *others])) == 21


def test_a_full_pool_is_left_as_it_is() -> None:
    request, engine = request_of(40), Engine(num_blocks=32)
    runs = prefilled(request)
    busy = replace(request_of(41), request_id="busy", sampling=SamplingParams(max_tokens=20))
    engine.core.add(busy)
    engine.core.step()
    engine.core.add(received(request, runs))
    # Twenty blocks are held by now, or promised; what is free takes some of the runs at most.
    while engine.core.has_work:
        assert all(output.error is None for output in engine.core.step())
    engine.pool.check_integrity()


def test_the_end_of_a_chain_does_not_evict_its_beginning() -> None:
    request, engine = request_of(21), Engine(num_blocks=16)
    beginning = replace(request, request_id="b", prompt_token_ids=request.prompt_token_ids[:7])
    engine.run(replace(beginning, sampling=SamplingParams(max_tokens=1)))
    # Younger than the beginning, in all other blocks.
    engine.run(replace(request_of(26), request_id="c", sampling=SamplingParams(max_tokens=1)))
    assert engine.num_prefilled(received(request, prefilled(request))) == 1


def test_a_block_with_unverified_tokens_is_zeroed_before_it_is_restored() -> None:
    """Zeroed later, it would lose what has been restored into it."""
    request, engine = request_of(21), Engine(num_blocks=16)
    aborted = replace(request_of(23), request_id="aborted")
    engine.core.add(aborted)
    engine.core.step()  # the first chunk of sixteen tokens
    engine.core.cancel("aborted")
    assert engine.num_prefilled(received(request, prefilled(request))) == 1
    assert engine.runner.zeroed


def test_a_resumed_request_restores_its_prompt() -> None:
    request = request_of()
    expected = [token for _, tokens in tokens_of(Engine().run(request)) for token in tokens]
    resumed = replace(request, logged=[LoggedChoice(expected[:4], False)])
    outputs = Engine(seed=3).run(received(resumed, prefilled(request)))
    assert [t for _, tokens in tokens_of(outputs) for t in tokens] == expected[4:]


def test_blocks_that_cannot_be_written_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example because a GPU has no memory left for the copy."""
    request, engine = request_of(), Engine()
    runs, write, writes = prefilled(request), engine.runner.write_blocks, itertools.count(1)

    def fail_once(blocks: list[int], data: memoryview, skip: int) -> None:
        if next(writes) == 2:
            raise NotWritten
        write(blocks, data, skip)

    monkeypatch.setattr(engine.runner, "write_blocks", fail_once)
    # The first of the four runs was written.
    assert engine.num_prefilled(received(request, runs)) == 21 - 6


def test_memory_of_received_blocks_is_given_up_as_soon_as_they_are_copied() -> None:
    """Three runs of three blocks and one of one; a step copies eight blocks."""
    request = request_of()
    with_kv = received(request, prefilled(request))
    assert with_kv.received is not None
    engine = Engine()
    engine.core.add(with_kv)
    engine.core.step()
    assert [run.first for run in with_kv.received.runs] == [6, 9]
    engine.core.step()
    assert with_kv.received.runs == []


@pytest.mark.parametrize("skip", [True, False])
def test_memory_of_blocks_that_are_not_used_is_given_up(skip: bool) -> None:
    request = request_of()
    (first, *_) = prefilled(request)
    unread = msgspec.structs.replace(request.sampling, skip_reading_prefix_cache=skip)
    with_kv = received(replace(request, sampling=unread), [replace(first, hashes=["other"])])
    assert with_kv.received is not None
    engine = Engine()
    engine.core.add(with_kv)
    engine.core.step()
    assert with_kv.received.runs == []
    engine.core.cancel("r")


def test_restored_blocks_are_published() -> None:
    request, engine = request_of(), Engine()
    runs = prefilled(request)
    engine.events.take()
    engine.core.add(received(request, runs))
    for _ in range(2):
        engine.core.step()
    stored = [event for event in engine.events.take() if isinstance(event, BlockStored)]
    restored = [token for event in stored for token in event.token_ids]
    assert restored[:20] == request.prompt_token_ids[:20]


def test_others_advance_while_a_long_prompt_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    request, engine = request_of(64), Engine(num_blocks=96)
    runs, write, written = prefilled(request), engine.runner.write_blocks, list[int]()

    def watched(blocks: list[int], data: memoryview, skip: int) -> None:
        written.append(len(blocks))
        write(blocks, data, skip)

    monkeypatch.setattr(engine.runner, "write_blocks", watched)
    sampling = SamplingParams(max_tokens=20, ignore_eos=True)
    running = replace(request_of(5), request_id="running", sampling=sampling)
    engine.core.add(running)
    engine.core.step()
    engine.core.add(received(request, runs))
    steps = list[tuple[int, dict[str, list[int]]]]()
    while engine.core.has_work:
        written.clear()
        outputs = engine.core.step()
        new = {output.request_id: output.choices[0].token_ids for output in outputs}
        steps.append((sum(written), new))
    # The first token comes from the step before which the last blocks were restored.
    assert [(num, sorted(new)) for num, new in steps[:4]] == [
        *[(16 // BLOCK_SIZE, ["running"])] * 3,
        (7, ["r", "running"]),
    ]
    assert all(len(new["running"]) == 1 for _, new in steps[:19])
    token_ids = [token for _, new in steps for token in new.get("r", [])]
    assert token_ids == [t for _, ts in tokens_of(Engine(num_blocks=96).run(request)) for t in ts]
    engine.pool.check_integrity()


def test_requests_are_restored_in_their_order_within_one_budget() -> None:
    first, second = request_of(31), replace(request_of(33), request_id="second")
    both = [received(request, prefilled(request)) for request in (first, second)]
    engine = Engine(num_blocks=96)
    for each in both:
        engine.core.add(each)
    left = []
    for _ in range(5):
        engine.core.step()
        kvs = (request.received for request in both)
        left.append(tuple(len(kv.runs) for kv in kvs if kv is not None))
    # Fifteen blocks in five runs, sixteen in six; eight before each step.
    assert left == [(3, 6), (0, 6), (0, 3), (0, 0), (0, 0)]


def test_a_request_that_is_cancelled_while_it_is_restored_leaves_nothing() -> None:
    request, engine = request_of(40), Engine()
    engine.core.add(received(request, prefilled(request)))
    engine.core.step()
    engine.core.cancel("r")
    assert not engine.core.has_work
    engine.pool.check_integrity()
    assert engine.pool.num_free == NUM_BLOCKS


def test_blocks_that_are_evicted_between_two_steps_are_computed() -> None:
    """They would be evicted again."""
    request, engine = request_of(), Engine()
    engine.core.add(received(request, prefilled(request)))
    engine.core.step()
    hashes = engine.core.kv_exchange.prompt_hashes(request)
    engine.pool.unregister(engine.pool.find(hashes))
    while engine.core.has_work:
        assert all(output.error is None for output in engine.core.step())
    assert engine.core.stats().prefix_hit_tokens == 0


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    num_blocks=st.integers(28, 48),
    pauses=st.lists(st.integers(0, 3), min_size=4, max_size=4),
)
def test_a_restored_request_among_others_yields_the_tokens_of_one_alone(
    lengths: list[int], num_blocks: int, pauses: list[int]
) -> None:
    requests = [
        replace(request_of(length, n=1 + number % 2), request_id=str(number))
        for number, length in enumerate(lengths)
    ]
    engine = Engine(num_blocks=num_blocks)
    answers: dict[str, list[tuple[int, list[int]]]] = {}

    def step() -> None:
        for output in engine.core.step():
            assert output.error is None
            answers.setdefault(output.request_id, []).extend(tokens_of([output]))

    for request, pause in zip(requests, pauses, strict=False):
        engine.core.add(received(request, prefilled(request)))
        for _ in range(pause):
            step()
    while engine.core.has_work:
        step()
    engine.pool.check_integrity()
    for request in requests:
        alone = tokens_of(Engine(num_blocks=96).run(request))
        for choice in range(request.sampling.n):
            assert [t for c, ts in answers[request.request_id] if c == choice for t in ts] == [
                t for c, ts in alone if c == choice for t in ts
            ]


def test_an_engine_without_memory_to_exchange_computes_the_prompt() -> None:
    request = request_of()
    runner = FakeRunner(BLOCK_SIZE, VOCAB_SIZE)
    core = make_core(runner, BlockPool(NUM_BLOCKS, BLOCK_SIZE), VOCAB_SIZE)
    core.add(received(replace(request, export_run_bytes=1), prefilled(request)))
    outputs = []
    while core.has_work:
        outputs += core.step()
    assert core.stats().prefix_hit_tokens == 0
    assert outputs[-1].kv == []

"""Items that a tower thread encodes next to the step thread, with a real model."""

import asyncio
import copy
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from tests.engine.model.test_parity import Case, Twins, answers_of, make_case, make_twins, run_core
from tests.support.engine import make_core, spell
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import EngineRequest, RequestOutput
from workers.engine.item_encoder import ItemEncoder
from workers.engine.runner import ModelRunner
from workers.engine.step_thread import StepThread

pytestmark = pytest.mark.usefixtures("one_thread")
Outputs = asyncio.Queue[RequestOutput]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def twins(request: pytest.FixtureRequest) -> Twins:
    return make_twins(request.param)


class HeldTower:
    """A tower each of whose batches waits until the test releases `go_on`."""

    def __init__(self, tower: Tower) -> None:
        self.adapter, self.device = tower.adapter, tower.device
        self._tower = tower
        self.go_on = threading.Semaphore(0)
        self.begun = threading.Semaphore(0)
        self.batches: list[int] = []

    async def begin(self) -> None:
        """Wait until the next batch has begun."""
        assert await asyncio.to_thread(self.begun.acquire, timeout=20)

    def encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        self.begun.release()
        self.go_on.acquire()
        self.batches.append(len(batch))
        return self._tower.encode(batch)


class Engine:
    """A step thread and a tower thread."""

    def __init__(self, twins: Twins, tower: Any, num_blocks: int) -> None:
        self.shared: list[str] = []
        self.encoder = ItemEncoder(tower, 48, lambda mm_hash, _: self.shared.append(mm_hash))
        runner = ModelRunner(twins.served, num_blocks, 4, twins.tower, 2**20, encoder=self.encoder)
        vocab_size = twins.served.vocab_size
        pool = BlockPool(num_blocks, 4)
        self.core = make_core(runner, pool, vocab_size, decode=spell, max_num_batched_tokens=13)
        self.outputs: dict[str, Outputs] = {}
        loop = asyncio.get_running_loop()
        self.steps: StepThread[Outputs] = StepThread(
            self.core,
            lambda outputs, stats: loop.call_soon_threadsafe(self._on_step, outputs),
            lambda error: loop.call_soon_threadsafe(self.crashes.append, error),
        )
        self.crashes: list[Exception] = []
        self.encoder.on_result = self.steps.take_embedding

    def _on_step(self, outputs: list[tuple[Outputs, RequestOutput]]) -> None:
        for queue, output in outputs:
            queue.put_nowait(output)

    def add(self, case: Case, **changes: Any) -> None:
        """Add a request with separate items, because the engine changes them."""
        items = [copy.copy(item) for item in case.request.items]
        request: EngineRequest = replace(case.request, items=items, **changes)
        self.outputs[request.request_id] = queue = Outputs()
        self.steps.add(request, queue)

    async def tokens(self, request_id: str) -> list[int]:
        """Return the answer of a request. Raises its error."""
        token_ids: list[int] = []
        while True:
            output = await asyncio.wait_for(self.outputs[request_id].get(), 20)
            token_ids += [token for delta in output.choices for token in delta.token_ids]
            if output.error is not None:
                raise output.error
            if output.usage is not None:
                return token_ids


@asynccontextmanager
async def running(twins: Twins, tower: Any, num_blocks: int = 64) -> AsyncIterator[Engine]:
    engine = Engine(twins, tower, num_blocks)
    working = asyncio.create_task(engine.encoder.thread.work())
    engine.steps.start()
    try:
        yield engine
        assert engine.crashes == []
    finally:
        if isinstance(tower, HeldTower):
            tower.go_on.release(1000)
        engine.steps.stop()
        working.cancel()
        engine.encoder.thread.close()


@pytest.mark.parametrize("num_blocks", [64, 17])
async def test_answers_are_those_of_items_encoded_in_steps(twins: Twins, num_blocks: int) -> None:
    """With 17 blocks, sequences are preempted."""
    assert twins.tower is not None
    cases = [
        make_case("text", [], 23, 20),
        make_case("one", [(90, 60)], 9, 24),
        make_case("two", [(60, 120), (140, 84)], 5, 16),
    ]
    expected, _ = run_core(twins, cases, num_blocks=num_blocks, budget=13, steps_between=0)
    assert expected == answers_of(twins, cases)
    async with running(twins, twins.tower, num_blocks) as engine:
        for case in cases:
            engine.add(case)
        actual = {name: await engine.tokens(name) for name in expected}
        assert actual == expected
        assert engine.core.stats().encoded_items >= 3
        assert (engine.core.stats().num_preemptions > 0) == (num_blocks == 17)


async def test_answers_continue_while_an_item_is_encoded(twins: Twins) -> None:
    assert twins.tower is not None
    tower = HeldTower(twins.tower)
    text, seen = make_case("words", [], 5, 20), make_case("seen", [(90, 60)], 9, 24)
    async with running(twins, tower) as engine:
        engine.add(seen)
        await tower.begin()
        engine.add(text)
        assert await engine.tokens("words") == answers_of(twins, [text])["words"]
        assert engine.outputs["seen"].empty()
        tower.go_on.release()
        assert await engine.tokens("seen") == answers_of(twins, [seen])["seen"]


async def test_an_item_of_several_requests_is_encoded_once(twins: Twins) -> None:
    """It is in the cache afterwards, and has been shared with other engines."""
    assert twins.tower is not None
    tower = HeldTower(twins.tower)
    case = make_case("first", [(90, 60)], 9, 24)
    again = Case(replace(case.request, request_id="second"), case.images)
    async with running(twins, tower) as engine:
        engine.add(case)
        engine.add(again)
        await tower.begin()
        tower.go_on.release()
        expected = answers_of(twins, [case])["first"]
        assert await engine.tokens("first") == expected
        assert await engine.tokens("second") == expected
        # Without cached blocks, because those are of another tenant. Hashes are as well in reality.
        engine.add(Case(replace(case.request, request_id="third"), case.images), tenant="other")
        assert await engine.tokens("third") == expected
        assert tower.batches == [1]
        assert engine.shared == [case.request.items[0].mm_hash]
        stats = engine.core.stats()
        assert (stats.encoded_items, stats.mm_cache_queries, stats.mm_cache_hits) == (1, 3, 1)


async def test_a_cancelled_request_leaves_no_item_to_encode(twins: Twins) -> None:
    assert twins.tower is not None
    tower = HeldTower(twins.tower)
    first, gone, last = (make_case(name, [(90, 60)], 9, 24) for name in ("a", "b", "c"))
    async with running(twins, tower) as engine:
        engine.add(first)
        await tower.begin()
        engine.add(gone)
        engine.steps.cancel("b")
        engine.add(last, lane="batch")
        engine.add(Case(replace(last.request, request_id="d"), last.images))
        tower.go_on.release(3)
        for name in ("a", "c", "d"):
            await engine.tokens(name)
        assert sum(tower.batches) == 2


async def test_an_item_that_is_not_finite_fails_its_request_alone(twins: Twins) -> None:
    assert twins.tower is not None
    good, bad = (make_case(name, [(90, 60)], 9, 24) for name in ("good", "bad"))
    fields = {**bad.request.items[0].fields, "pixel_table": torch.full((3, 256), 3e38)}
    items = [replace(bad.request.items[0], mm_hash="bad", fields=fields)]
    async with running(twins, twins.tower) as engine:
        engine.add(Case(replace(bad.request, items=items), []))
        engine.add(good)
        assert await engine.tokens("good") == answers_of(twins, [good])["good"]
        with pytest.raises(Exception, match="not finite"):
            await engine.tokens("bad")

"""KV events: vLLM's bytes, and from them exactly the blocks that can be found."""

from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.multimodal import PlaceholderRange
from shared.protocol.sampling import SamplingParams
from tests.fakes import FakeRunner
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.kv_events import (
    MAX_EVENT_TOKENS,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KVEvent,
    KVEvents,
    encode_batches,
    event_hash,
)
from workers.engine.core.sequence import EngineRequest, Item

BLOCK_SIZE = 2
VOCAB_SIZE = 50


class Batch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int


def decode(payload: bytes) -> list[KVEvent]:
    return list(msgspec.msgpack.decode(payload, type=Batch).events)


class Findable:
    """Blocks that a router considers cached after reading the events."""

    def __init__(self) -> None:
        self.hashes: set[int] = set()
        self.contents: dict[int, Any] = {}

    def apply(self, events: list[KVEvent]) -> None:
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.hashes.clear()
                case BlockRemoved():
                    assert self.hashes.issuperset(event.block_hashes), "it was not there"
                    self.hashes.difference_update(event.block_hashes)
                case BlockStored():
                    self._store(event)

    def _store(self, event: BlockStored) -> None:
        assert self.hashes.isdisjoint(event.block_hashes), "it was there already"
        self.hashes.update(event.block_hashes)
        parent = event.parent_block_hash
        assert event.extra_keys is not None
        for i, (block_hash, keys) in enumerate(
            zip(event.block_hashes, event.extra_keys, strict=True)
        ):
            token_ids = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
            assert len(token_ids) == BLOCK_SIZE
            content = (parent, token_ids, keys)
            assert self.contents.setdefault(block_hash, content) == content
            parent = block_hash


def new_core(num_blocks: int, events: KVEvents | None, prefix_caching: bool = True) -> EngineCore:
    return make_core(
        FakeRunner(BLOCK_SIZE, VOCAB_SIZE, fails_to_run=["bad"]),
        BlockPool(num_blocks, BLOCK_SIZE, events=events),
        VOCAB_SIZE,
        eos=[0],
        max_num_batched_tokens=16,
        max_model_len=24,
        prefix_caching=prefix_caching,
    )


def registered(core: EngineCore) -> set[int]:
    return {event_hash(block_hash) for block_hash in core._pool._block_by_hash}


def test_the_bytes_equal_vllms() -> None:
    """Payload of these events by vLLM's own encoder (0.32.0)."""
    events: list[KVEvent] = [
        AllBlocksCleared(),
        BlockStored(
            block_hashes=[2**64 - 1, 5],
            parent_block_hash=None,
            token_ids=[1, 2, 3, 4],
            block_size=2,
            lora_id=None,
            medium="GPU",
            lora_name="fr",
            extra_keys=[("fr", ("ab", -1), "acme"), None],
        ),
        BlockRemoved([5], "GPU"),
    ]
    assert encode_batches(events, 1.5) == [
        bytes.fromhex(
            "93cb3ff80000000000009381a474797065b0416c6c426c6f636b73436c656172656489a474797065"
            "ab426c6f636b53746f726564ac626c6f636b5f68617368657392cfffffffffffffffff05b1706172"
            "656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739401020304aa626c6f636b5f73697a"
            "6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f6e616d65a26672aa65787472"
            "615f6b6579739293a2667292a26162ffa461636d65c083a474797065ac426c6f636b52656d6f7665"
            "64ac626c6f636b5f6861736865739105a66d656469756da347505500"
        )
    ]


requests = st.builds(
    lambda request_id, prompt, mm_hash, length, **rest: EngineRequest(
        request_id,
        prompt + [7] * length,
        [Item("image", mm_hash, PlaceholderRange(len(prompt), length), {})] if length else [],
        **rest,
    ),
    st.just("bad") | st.uuids().map(str),
    st.lists(st.integers(1, 2), min_size=1, max_size=8),
    st.sampled_from("ab"),
    st.integers(0, 3),
    tenant=st.sampled_from(["", "x"]),
    adapter=st.sampled_from([None, "fr"]),
    sampling=st.builds(SamplingParams, n=st.integers(1, 2), max_tokens=st.integers(1, 8)),
)


@given(
    st.lists(requests, min_size=1, max_size=8, unique_by=lambda r: r.request_id),
    st.integers(12, 30),
)
def test_events_describe_exactly_the_cached_blocks(
    batch: list[EngineRequest], num_blocks: int
) -> None:
    """The events hold for computed, shared, evicted, preempted and failed blocks."""
    events = KVEvents()
    core = new_core(num_blocks, events)
    findable = Findable()
    findable.hashes.add(0)  # of an engine of that name before
    for request in batch:
        core.add(request)
        core.step()
        findable.apply(events.take())
        assert findable.hashes == registered(core)
    while core.has_work:
        core.step()
        findable.apply(events.take())
        assert findable.hashes == registered(core)


def test_events_contain_images_tenant_and_adapter() -> None:
    events = KVEvents()
    core = new_core(16, events)
    item = Item("image", "ab", PlaceholderRange(1, 2), {})
    sampling = SamplingParams(max_tokens=1)
    core.add(EngineRequest("r", [1, 7, 7, 1, 1], [item], sampling, tenant="acme", adapter="fr"))
    core.step()
    _, stored = events.take()
    assert isinstance(stored, BlockStored)
    assert stored.extra_keys == [("fr", ("ab", 1), "acme"), ("fr", ("ab", -1))]
    assert (stored.lora_name, stored.token_ids) == ("fr", [1, 7, 7, 1])


def test_a_long_prompt_is_published_as_several_chained_events() -> None:
    events = KVEvents()
    num_blocks = 6 * MAX_EVENT_TOKENS // BLOCK_SIZE
    hashes = [f"{2**63 + i:064x}" for i in range(num_blocks)]
    token_ids = list(range(100_000, 100_000 + num_blocks * BLOCK_SIZE))
    events.add_stored(hashes, None, token_ids, [None] * num_blocks, None)
    batches = encode_batches(events.take(), 0.0)
    assert max(map(len, batches)) < 2**19
    assert len(batches) > 1
    findable = Findable()
    published = [event for batch in batches for event in decode(batch)]
    findable.apply(published)
    assert len(findable.hashes) == num_blocks
    stored = [event for event in published if isinstance(event, BlockStored)]
    assert [event.parent_block_hash for event in stored[1:]] == [
        event.block_hashes[-1] for event in stored[:-1]
    ]
    assert [t for event in stored for t in event.token_ids] == token_ids


def test_without_the_cache_there_are_no_events() -> None:
    events = KVEvents()
    core = new_core(16, events, prefix_caching=False)
    core.add(EngineRequest("r", [1] * 8, [], SamplingParams(max_tokens=4, n=2)))
    while core.has_work:
        core.step()
    assert events.take() == [AllBlocksCleared()]
    assert registered(core) == set()

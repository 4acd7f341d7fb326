"""Shares of tenants in a stream that deletes its oldest messages when it is full."""

from collections import Counter, deque

from hypothesis import given
from hypothesis import strategies as st

from shared.tenants.storage_shares import NEWCOMER, StreamUse, exceeded_shares, may_be_exceeded

MAX = 1000
TENANTS = "abcd"
# Smaller than the reserve, into which what was admitted may grow.
WRITES = st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 90)), max_size=200)
WEIGHTS = st.dictionaries(st.sampled_from(TENANTS), st.sampled_from([0.1, 0.5, 1.0, 3.0, 100.0]))


class Stream:
    """A stream of messages, each of a tenant and a size."""

    def __init__(self) -> None:
        self.messages: deque[tuple[str, int]] = deque()
        self.bytes: Counter[str] = Counter()
        self.deleted: Counter[str] = Counter()

    def use(self) -> StreamUse:
        return StreamUse("S", MAX, self.bytes.total(), self.bytes)

    def admits(self, tenant: str, weights: dict[str, float]) -> bool:
        refused = {share.tenant for share in exceeded_shares(self.use(), weights)}
        return tenant not in refused and NEWCOMER not in refused

    def store(self, tenant: str, size: int) -> None:
        self.messages.append((tenant, size))
        self.bytes[tenant] += size
        while self.bytes.total() > MAX:
            oldest, freed = self.messages.popleft()
            self.bytes[oldest] -= freed
            self.deleted[oldest] += freed


@given(WRITES, WEIGHTS)
def test_nothing_of_others_is_deleted_for_a_tenant(
    writes: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    stream = Stream()
    stream.store("quiet", 1)
    for tenant, size in writes:
        if stream.admits(tenant, weights):
            stream.store(tenant, size)
    assert not stream.deleted


@given(WRITES, WRITES, WEIGHTS)
def test_only_a_tenant_that_was_alone_loses_anything_when_others_come(
    alone: list[tuple[str, int]], then: list[tuple[str, int]], weights: dict[str, float]
) -> None:
    stream = Stream()
    for _, size in alone:
        assert stream.admits("first", weights)
        stream.store("first", size)
    for tenant, size in then:
        if stream.admits(tenant, weights):
            stream.store(tenant, size)
    assert set(+stream.deleted) <= {"first"}


@given(WRITES)
def test_a_newcomer_finds_room_next_to_greedy_tenants(writes: list[tuple[str, int]]) -> None:
    stream = Stream()
    stream.store("quiet", 1)
    for tenant, size in writes:
        while stream.admits(tenant, {}):
            stream.store(tenant, min(size, 20))
    assert stream.admits("next", {})
    assert stream.admits("quiet", {})


def test_a_stream_that_one_tenant_has_filled_alone_has_room_for_the_next() -> None:
    stream = Stream()
    for _ in range(60):
        stream.store("first", 20)
    while stream.admits("next", {}):
        stream.store("next", 20)
    assert stream.bytes["next"] >= MAX / 5
    assert not stream.admits("first", {})


@given(WRITES, st.integers(0, 500), WEIGHTS)
def test_tenants_need_not_be_measured_in_a_stream_that_is_rather_empty(
    writes: list[tuple[str, int]], without: int, weights: dict[str, float]
) -> None:
    stream = Stream()
    for tenant, size in writes:
        stream.store(tenant, size)
    num_bytes = stream.bytes.total() + without
    use = StreamUse("S", MAX, num_bytes, stream.bytes)
    if exceeded_shares(use, weights):
        assert may_be_exceeded(MAX, num_bytes, weights)


def test_shares_follow_weights_and_are_reported() -> None:
    use = StreamUse("S", MAX, 700, {"big": 600, "small": 100})
    (share,) = exceeded_shares(use, {})
    assert (share.tenant, share.num_bytes, share.max_bytes) == ("big", 600, 400)
    assert not exceeded_shares(use, {"big": 4.0})


def test_messages_without_a_tenant_take_at_most_half() -> None:
    use = StreamUse("S", MAX, MAX, {"a": 100, "b": 10})
    assert not exceeded_shares(use, {})

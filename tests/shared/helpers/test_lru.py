from hypothesis import given
from hypothesis import strategies as st

from shared.helpers.lru import ByteLRU

OPERATIONS = st.lists(
    st.tuples(st.sampled_from("abcde"), st.one_of(st.none(), st.integers(0, 12))), max_size=60
)


@given(OPERATIONS)
def test_the_cache_equals_a_list_in_order_of_use(operations: list[tuple[str, int | None]]) -> None:
    """Apply steps: `None` reads, and a number writes an entry of that many bytes."""
    cache: ByteLRU[str, int] = ByteLRU(10)
    model: list[tuple[str, int]] = []  # least recently used first
    for number, (key, num_bytes) in enumerate(operations):
        entries = [entry for entry in model if entry[0] == key]
        rest = [entry for entry in model if entry[0] != key]
        if num_bytes is None:
            assert (cache.get(key) is not None) == bool(entries)
            model = rest + entries
            continue
        cache.put(key, number, num_bytes)
        model = rest
        if num_bytes <= 10:
            while sum(size for _, size in model) + num_bytes > 10:
                model.pop(0)
            model.append((key, num_bytes))
        assert cache.num_bytes == sum(size for _, size in model) <= 10
        assert len(cache) == len(model)
        assert all(name in cache for name, _ in model)


def test_hits_and_misses_are_counted() -> None:
    cache: ByteLRU[str, bytes] = ByteLRU(10)
    cache.put("a", b"x", 1)
    assert (cache.get("a"), cache.get("b")) == (b"x", None)
    assert (cache.hits, cache.misses) == (1, 1)

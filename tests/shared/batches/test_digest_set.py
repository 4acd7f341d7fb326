"""Set of digests: it has whole digests alone, and is small."""

import hashlib
import tracemalloc

from hypothesis import given
from hypothesis import strategies as st

from shared.batches.digest_set import DigestSet

NUM = 200_000
MAX_BYTES_EACH = 50


@given(st.lists(st.text("ab", min_size=4, max_size=4)))
def test_it_has_what_was_added(texts: list[str]) -> None:
    digests, added = DigestSet(), set[str]()
    for text in texts:
        assert digests.add(text.encode()) == (text not in added)
        added.add(text)


def test_bytes_across_two_digests_are_not_in_the_set() -> None:
    digests = DigestSet()
    assert digests.add(b"aaba")
    assert digests.add(b"aaab")
    assert digests.add(b"aaaa")
    assert not digests.add(b"aaaa")


def test_a_digest_takes_little_more_than_its_bytes() -> None:
    digests = DigestSet()
    tracemalloc.start()
    try:
        for number in range(NUM):
            digests.add(hashlib.blake2b(b"%d" % number, digest_size=16).digest())
        num_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert num_bytes < MAX_BYTES_EACH * NUM

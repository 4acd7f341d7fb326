"""A pool of decoders for all tests of a file."""

from collections.abc import Iterator

import pytest

from tests.renderer.decoding.reading import LIMITS, Reader
from workers.renderer.decoding.pool import DecoderPool


@pytest.fixture(scope="module")
def reader() -> Iterator[Reader]:
    pool = DecoderPool(LIMITS, max_decoders=2)
    yield Reader(pool)
    pool.close()

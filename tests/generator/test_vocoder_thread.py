"""The thread that computes: batches of what waits, cancellation, and errors of one chunk alone."""

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from shared.stage.inputs import RequestEnded
from workers.generator.core.schedule import Window
from workers.generator.core.vocoder import Chunk, Codes, Samples
from workers.generator.vocoder_thread import VocoderThread

WINDOW = Window(0, 0, 1, 1)
BAD = 13


class CountingVocoder:
    """A vocoder that returns the codes as samples. It waits until the test releases it."""

    sample_rate, samples_per_frame, num_codebooks, num_codes = 1, 1, 1, 100
    min_left, min_right, num_missing = 0, 0, 0

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.began = threading.Semaphore(0)
        self.may_go_on = threading.Semaphore(0)

    def carry(self, codes: Codes, position: int) -> int:
        return 0

    def synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        values = [int(chunk.codes[0, 0]) for chunk in chunks]
        self.batches.append(values)
        self.began.release()
        assert self.may_go_on.acquire(timeout=20)
        if BAD in values:
            raise ValueError("a bad code")
        return [np.array([code], np.int16) for code in values]


@contextlib.asynccontextmanager
async def running(vocoder: CountingVocoder, max_batch: int = 8) -> AsyncIterator[VocoderThread]:
    thread = VocoderThread(vocoder, max_batch)
    work = asyncio.create_task(thread.work())
    try:
        yield thread
    finally:
        work.cancel()
        vocoder.may_go_on.release(100)
        thread.close()


def speak(thread: VocoderThread, code: int) -> asyncio.Task[Samples]:
    """Have the chunk of a code made, the more urgent the less the code is."""
    codes = np.array([[code]], np.int32)
    return asyncio.create_task(thread.speak(f"r{code}", codes, WINDOW, float(code)))


async def began(vocoder: CountingVocoder) -> None:
    assert await asyncio.to_thread(vocoder.began.acquire, timeout=20)


async def test_images_that_wait_while_a_batch_runs_are_the_next_batch() -> None:
    vocoder = CountingVocoder()
    async with running(vocoder, max_batch=3) as thread:
        tasks = [speak(thread, 50)]
        await began(vocoder)
        assert thread.batch_s > 0
        tasks += [speak(thread, code) for code in (4, 2, 1, 3)]
        vocoder.may_go_on.release(10)
        assert [samples.tolist() for samples in await asyncio.gather(*tasks)] == [
            [50],
            [4],
            [2],
            [1],
            [3],
        ]
        assert vocoder.batches == [[50], [1, 2, 3], [4]]
        assert (thread.num_waiting, thread.batch_s) == (0, 0.0)


async def test_a_cancelled_request_is_not_computed() -> None:
    vocoder = CountingVocoder()
    async with running(vocoder) as thread:
        first = speak(thread, 1)
        await began(vocoder)
        second, third = speak(thread, 2), speak(thread, 3)
        await asyncio.sleep(0)
        thread.cancel("r2")
        thread.cancel("r1")  # It is being computed, so its result comes.
        thread.cancel("r9")
        vocoder.may_go_on.release(10)
        with pytest.raises(RequestEnded):
            await second
        assert (await first).tolist() == [1]
        assert (await third).tolist() == [3]
        assert vocoder.batches == [[1], [3]]


async def test_a_handler_that_is_stopped_leaves_nothing_in_the_queue() -> None:
    vocoder = CountingVocoder()
    async with running(vocoder) as thread:
        first = speak(thread, 1)
        await began(vocoder)
        second = speak(thread, 2)
        await asyncio.sleep(0)
        second.cancel()
        first.cancel()
        await asyncio.gather(first, second, return_exceptions=True)
        assert thread.num_waiting == 0
        again = speak(thread, 2)
        vocoder.may_go_on.release(10)
        assert (await again).tolist() == [2]


async def test_only_the_chunk_that_causes_an_error_fails() -> None:
    vocoder = CountingVocoder()
    async with running(vocoder) as thread:
        first = speak(thread, 1)
        await began(vocoder)
        tasks = [speak(thread, code) for code in (2, BAD, 3)]
        await asyncio.sleep(0)
        vocoder.may_go_on.release(10)
        outcomes = await asyncio.gather(first, *tasks, return_exceptions=True)
        assert isinstance(outcomes[2], ValueError)
        assert [x.tolist() for x in outcomes if not isinstance(x, BaseException)] == [[1], [2], [3]]
        assert vocoder.batches == [[1], [2, 3, BAD], [2], [3], [BAD]]

"""Image requests while other clients send videos: hostile and harmless ones.

Each attack is measured at a rate, and in a closed loop: each of several senders sends the next file
when the last one is refused. Such a loop uses all of the machine that it can get. So the same
number of bytes a second is then sent in harmless ways: stored without a request, and stored as
clips that are answered.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from ops.bench.media.clips import make_bombs, make_clip, padded, renamed
from ops.bench.media.senders import Sent, Use, sending
from ops.bench.media.serving import Images, ask_about
from ops.harness.samples import Samples
from shared import client
from shared.bus.bus import Bus

RATE = 4.0
"""Hostile files a second, in the measurements at a rate."""
AT_ONCE = 4
"""Senders in a closed loop."""
MAX_P95 = 1.5
PAUSE_S = 0.5


@dataclass
class Interference:
    """Milliseconds of image requests, alone and during one kind of other work."""

    alone: Samples = field(default_factory=Samples)
    during: Samples = field(default_factory=Samples)
    rates: Samples = field(default_factory=Samples)
    """Files of the others a second, in each round."""

    @property
    def ratio(self) -> float:
        return self.during.p95 / self.alone.p95

    def row(self) -> tuple[str, ...]:
        medians, p95s = zip(*((t.median, t.p95) for t in (self.alone, self.during)), strict=True)
        return *(f"{n:.1f}" for n in (fmean(self.rates), *medians, *p95s)), f"{self.ratio:.2f}"


class Measuring:
    def __init__(self, bus: Bus, url: str, images: Images, folder: Path, count: int) -> None:
        self._bus = bus
        self._url = url
        self._images = images
        self._folder = folder
        self._count = count
        self.results: dict[str, Interference] = defaultdict(Interference)

    async def round(self) -> None:
        """Measure each attack and its controls once."""
        small = make_clip(1, (64, 48))
        for name, bomb in make_bombs().items():
            hostile, harmless = self._folder / "hostile", self._folder / "harmless"
            hostile.write_bytes(bomb)
            harmless.write_bytes(padded(small, len(bomb)))
            title = f"{name}, {len(bomb) / 1e6:.1f} MB"
            loop = f"{title}, {AT_ONCE} senders"
            await self._measure(title, self._sending(hostile, "refused", RATE))
            rate = await self._measure(loop, self._sending(hostile, "refused"))
            controls: tuple[Use, ...] = ("stored", "asked")
            for use in controls:
                others = self._sending(harmless, use, rate)
                await self._measure(f"{loop}: as many bytes, {use}", others)

    def _sending(
        self, file: Path, use: Use, rate: float | None = None
    ) -> AbstractAsyncContextManager[Sent]:
        return sending(self._url, file, use, rate, AT_ONCE)

    async def clips(self) -> None:
        """Measure new large clips in a closed loop; some are still rendered after its end."""
        await self._measure(f"new clips, {AT_ONCE} senders", self._sending_clips())

    async def _measure(self, name: str, others: AbstractAsyncContextManager[Sent]) -> float:
        results = self.results[name]
        results.alone += await self._images.measure(self._count)
        async with others as counts:
            await asyncio.sleep(PAUSE_S)
            results.during += await self._images.measure(self._count)
        results.rates.append(counts.rate)
        await asyncio.sleep(PAUSE_S)
        return counts.rate

    @contextlib.asynccontextmanager
    async def _sending_clips(self) -> AsyncIterator[Sent]:
        """Send clips from this process, which receives their results."""
        counts, clip = Sent(), make_clip()
        loop = asyncio.get_running_loop()

        async def send() -> None:
            while True:
                url = await client.pin_media(self._bus, renamed(clip))
                await self._images.ask(ask_about(url))
                counts.files += 1

        tasks = [asyncio.create_task(send()) for _ in range(AT_ONCE)]
        began = loop.time()
        try:
            yield counts
        finally:
            counts.seconds = loop.time() - began
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

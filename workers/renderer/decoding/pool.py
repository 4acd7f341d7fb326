"""Pool of decoders: a bounded number of processes, each of which decodes one file.

If a file crashes its decoder or exceeds its limits, it is refused. It is then refused at once for
some time, so that a bomb that is sent a hundred times costs one process. If its probe succeeded,
only the same use of the file is refused, because other frames may cost less. A decoder that was
killed from outside is not the file's fault: it is replaced, and reading continues after the last
piece.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from contextlib import contextmanager

from shared.helpers.forking import Forks
from workers.renderer.decoding.decoding import Decoding, ExceedsLimits
from workers.renderer.decoding.messages import DecodingLimits, Job, Kind

SPAWNER = "workers.renderer.decoding.spawner"
REMEMBERED_S = 600.0
"""Time for which a file is refused after it has crashed a decoder or exceeded its limits."""
MAX_REMEMBERED = 4096


class DecoderPool:
    """Opens files in decoder processes. Thread-safe."""

    def __init__(
        self, limits: DecodingLimits, max_decoders: int, module: str | None = None
    ) -> None:
        """Decode in at most `max_decoders` processes; `module` replaces the spawner's module."""
        self._limits = limits
        self.forks = Forks(module or SPAWNER)
        self._free = threading.BoundedSemaphore(max_decoders)
        self._lock = threading.Lock()
        self._refused: OrderedDict[tuple[Kind, str, Hashable], tuple[float, str]] = OrderedDict()
        """End of the refusal and its message, by kind, hash and use of a file; None for any use."""

    def start(self) -> None:
        """Start the spawner, so that the first decoder does not have to wait for it."""
        self.forks.start()

    def close(self) -> None:
        self.forks.close()

    @contextmanager
    def open(
        self, kind: Kind, data: bytes, source_hash: str, field: str, use: Hashable = ()
    ) -> Iterator[Decoding]:
        """Decode a file; blocks until a decoder is free. Raises the errors of Decoding.

        `use` contains everything that determines which parts of the file are read.
        """
        with self._free, self.join(kind, data, source_hash, field, use) as decoding:
            yield decoding

    @contextmanager
    def join(
        self, kind: Kind, data: bytes, source_hash: str, field: str, use: Hashable = ()
    ) -> Iterator[Decoding]:
        """Decode another part of a file while the caller has a decoder of it open.

        This does not wait for a free decoder: two callers could wait for each other forever. Only
        one of the caller's two decoders works at a time. Raises the errors of Decoding.
        """
        self._check(kind, source_hash, field, use)
        with Decoding(self.forks, Job(kind, self._limits), data, field) as decoding:
            try:
                yield decoding
            except ExceedsLimits as error:
                of_use = use if decoding.is_probed else None
                self._remember((kind, source_hash, of_use), error.message)
                raise

    def _check(self, kind: Kind, source_hash: str, field: str, use: Hashable) -> None:
        """Raise ExceedsLimits for a file that recently crashed a decoder or exceeded its limits."""
        for of_use in (use, None):
            with self._lock:
                until_s, message = self._refused.get((kind, source_hash, of_use), (0.0, ""))
            if time.monotonic() < until_s:
                raise ExceedsLimits(message, field=field)

    def _remember(self, key: tuple[Kind, str, Hashable], message: str) -> None:
        with self._lock:
            self._refused[key] = time.monotonic() + REMEMBERED_S, message
            while len(self._refused) > MAX_REMEMBERED:
                self._refused.popitem(last=False)

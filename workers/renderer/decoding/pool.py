"""The pool of decoders: at most so many processes, each of which decodes one file.

A decoder that dies of its file, or exceeds its limits, is the file's fault: the file is refused,
and refused at once for some time, so that a bomb that is sent a hundred times costs one process. If
it was probed before, only the use is refused that was made of it: other frames may cost less. A
decoder that somebody has killed is not blamed on it: it is replaced, and the work goes on behind
the last piece.
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
"""How long a file is refused that a decoder has died of."""
MAX_REMEMBERED = 4096


class DecoderPool:
    """Thread-safe."""

    def __init__(
        self, limits: DecodingLimits, max_decoders: int, module: str | None = None
    ) -> None:
        """Decode in at most `max_decoders` processes; `module` replaces that of the spawner."""
        self._limits = limits
        self.forks = Forks(module or SPAWNER)
        self._free = threading.BoundedSemaphore(max_decoders)
        self._lock = threading.Lock()
        self._refused: OrderedDict[tuple[Kind, str, Hashable], tuple[float, str]] = OrderedDict()
        """Until when a file is refused, and the message, by what is read, the file's hash and its
        use; None for any use."""

    def start(self) -> None:
        """Start what the first decoder would have to wait for."""
        self.forks.start()

    def close(self) -> None:
        self.forks.close()

    @contextmanager
    def open(
        self, kind: Kind, data: bytes, source_hash: str, field: str, use: Hashable = ()
    ) -> Iterator[Decoding]:
        """Decode a file; blocks until a decoder is free. Raises what the Decoding raises.

        `use` is what decides what will be read of the file.
        """
        with self._free, self.join(kind, data, source_hash, field, use) as decoding:
            yield decoding

    @contextmanager
    def join(
        self, kind: Kind, data: bytes, source_hash: str, field: str, use: Hashable = ()
    ) -> Iterator[Decoding]:
        """Decode another part of a file while the caller has a decoder of it open.

        No free decoder is waited for: callers that wait for each other's would do so forever. Of
        the two, one works at a time. Raises what the Decoding raises.
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
        """Raise ExceedsLimits for a file that a decoder has died of recently."""
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

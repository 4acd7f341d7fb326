"""A target of the fuzzer: a decoder with valid messages and the errors that are answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Form = Literal["json", "msgpack", "envelope", "bytes"]


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    name: str
    run: Callable[[bytes], Any]
    seeds: Callable[[], Sequence[bytes]]
    """Makes messages. `run` accepts at least one of them."""
    answers: tuple[type[Exception], ...] = ()
    """Errors that callers of the decoder expect. Any other one is a crash."""
    form: Form = "bytes"
    """Format of the messages, for mutations of values instead of bytes."""

    def answer(self, data: bytes) -> Any:
        """Return the decoded value, or the expected error."""
        try:
            return self.run(data)
        except self.answers as error:
            return error

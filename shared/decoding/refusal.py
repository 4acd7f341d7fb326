"""Exception of decoders for a refused file."""

from typing import Literal

Fault = Literal["invalid", "exceeded", "too_large", "unsupported"]
"""`exceeded` means that a limit on the decoder process was exceeded."""


class Refusal(Exception):
    """Raised for a file that is not decoded. The message is for the client."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault

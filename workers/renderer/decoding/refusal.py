"""The exception by which decoders refuse a file."""

from workers.renderer.decoding.messages import Fault


class Refusal(Exception):
    """A file that is not decoded. The message is for the client and holds number and limit."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault

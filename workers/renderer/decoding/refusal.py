"""Exception of decoders for a refused file."""

from workers.renderer.decoding.messages import Fault


class Refusal(Exception):
    """Raised for a file that is not decoded. The message is for the client."""

    def __init__(self, fault: Fault, message: str) -> None:
        super().__init__(message)
        self.fault: Fault = fault

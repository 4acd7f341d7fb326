"""A spawner of an installation without PyAV."""

import sys


def main(descriptor: int) -> None:
    sys.modules["av"] = None  # type: ignore[assignment]  # as Python marks what cannot be imported
    from workers.renderer.decoding import spawner

    spawner.main(descriptor)

"""`python -m ops.first_hour.hub`: a hub on this machine with the demo model, until Ctrl-C."""

import signal
import sys
from pathlib import Path

from tests.cli.hub_server import Hub

NAME = "pagemill/demo-vlm"
FOLDER = Path(__file__).parents[1] / "demo_model"
PORT = 8090


def main() -> None:
    files = {file.name: file.read_bytes() for file in FOLDER.iterdir()}
    with Hub({NAME: files}, port=PORT) as hub:
        sys.stdout.write(f"{NAME} is at {hub.url}\n")
        sys.stdout.flush()
        signal.sigwait({signal.SIGINT, signal.SIGTERM})


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()

"""A hub on this machine with the demo model, in place of the one on the internet."""

from pathlib import Path

from tests.cli.hub_server import Hub

NAME = "pagemill/demo-vlm"
FOLDER = Path(__file__).parents[1] / "demo_model"


def demo_hub() -> Hub:
    return Hub({NAME: {file.name: file.read_bytes() for file in FOLDER.iterdir()}})

"""Imports that wait for their first use.

The renderer reads the layouts of a family and never computes with torch, whose import would cost it
two seconds of processor time and 300 MiB. The file of a family therefore imports torch lazily.
Models that hear are the exception: the features of sounds need torch.
"""

import importlib
import sys
import threading
from typing import Any

_loading = threading.Lock()


class LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)


def hide_torch() -> None:
    """Let no search find torch.

    transformers loads it wherever it finds it: four seconds of processor time and 340 MiB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]


def load_torch() -> None:
    """Import torch for code of our own, also where it is hidden.

    transformers has looked for it once, and goes on without it. Thread-safe.
    """
    with _loading:
        if sys.modules.get("torch") is not None:
            return
        sys.modules.pop("torch", None)
        torch: Any = importlib.import_module("torch")
        # The threads that compute with it here are as many as there is work for.
        torch.set_num_threads(1)

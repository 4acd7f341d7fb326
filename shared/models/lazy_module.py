"""Imports that are delayed until their first use.

The renderer uses the layouts of a family without torch. Importing torch would take two seconds of
processor time and 300 MiB. The module of a family therefore imports torch lazily. Models with audio
input are the exception: the features of sounds need torch.
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
    """Hide torch from import searches.

    transformers loads torch if it finds it, which takes four seconds of processor time and 340 MiB.
    """
    sys.modules["torch"] = None  # type: ignore[assignment]


def load_torch() -> None:
    """Import torch, even if it is hidden.

    transformers has already searched for it, and continues to work without it. Thread-safe.
    """
    with _loading:
        if sys.modules.get("torch") is not None:
            return
        sys.modules.pop("torch", None)
        torch: Any = importlib.import_module("torch")
        # The renderer's own threads already run as many computations as there is work for.
        torch.set_num_threads(1)

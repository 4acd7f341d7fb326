"""Imports that wait for their first use.

The renderer reads the layouts of a family and never computes with torch, whose import would cost it
two seconds of processor time and 300 MiB. The file of a family therefore imports torch lazily.
"""

import importlib
from typing import Any


class LazyModule:
    """A module that is imported when one of its attributes is first read."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, attribute: str) -> Any:
        return getattr(importlib.import_module(self._name), attribute)

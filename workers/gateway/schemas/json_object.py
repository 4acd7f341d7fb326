"""Type of JSON objects that the gateway passes on as they are. Pure."""

from typing import Any

JsonObject = dict[str, Any]

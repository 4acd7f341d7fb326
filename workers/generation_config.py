"""Sampling defaults in the `generation_config.json` of a model folder."""

from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.protocol.sampling import SamplingParams

FILE = "generation_config.json"
# Parameters that choose among the tokens, which only sampling does.
_SAMPLED = ("temperature", "top_p", "top_k", "min_p")


def read_sampling_defaults(folder: Path) -> dict[str, Any]:
    """Return the sampling parameters that the file states; none without the file.

    `do_sample: false` is a temperature of 0. Raises ConfigError for values that requests may not
    have either.
    """
    file = folder / FILE
    if not file.is_file():
        return {}
    try:
        stated = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
        names = ("repetition_penalty", *_SAMPLED)
        defaults = {name: stated[name] for name in names if stated.get(name) is not None}
        if stated.get("do_sample") is False:
            defaults = {k: v for k, v in defaults.items() if k not in _SAMPLED}
            defaults["temperature"] = 0.0
        msgspec.convert(defaults, SamplingParams)
    except (OSError, msgspec.MsgspecError) as error:
        raise ConfigError(
            f"{file}: {reason_of(error)}: correct the file", field="models"
        ) from error
    return defaults

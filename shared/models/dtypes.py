"""The type of a model's weights, by its setting, its folder and its device."""

from typing import Any

AUTO = "auto"


def saved_dtype(config: Any) -> str | None:
    """Return the type of the weights by a config of transformers; None if it names none."""
    for part in (config, config.get_text_config(decoder=True)):
        dtype = getattr(part, "dtype", None)
        if dtype is not None:
            return str(dtype).removeprefix("torch.")
    return None


def choose_dtype(dtype: str, saved: str | None, device: str) -> str:
    """Return the type in which weights are served; `dtype` and `device` are settings.

    `saved` is the type of the weights in the folder. `auto` is exact on a CPU. On a GPU products of
    float32 do not use the matrix units, so weights have 16 bits there.
    """
    if dtype != AUTO:
        return dtype
    if device != "cuda":
        return "float32"
    return "float16" if saved == "float16" else "bfloat16"

"""The type of weights by its setting, by the checkpoint and by the device."""

from typing import Any

import pytest
import torch
from transformers import LlavaConfig

from shared.models.dtypes import choose_dtype, saved_dtype
from shared.models.tower import dtype_of_folder
from workers.settings import DEMO_MODEL


@pytest.mark.parametrize(
    ("dtype", "saved", "device", "served"),
    [
        ("auto", "bfloat16", "cpu", "float32"),
        ("auto", None, "cpu", "float32"),
        ("auto", "bfloat16", "cuda", "bfloat16"),
        ("auto", "float16", "cuda", "float16"),
        ("auto", "float32", "cuda", "bfloat16"),
        ("auto", "float8_e4m3fn", "cuda", "bfloat16"),
        ("auto", None, "cuda", "bfloat16"),
        ("float32", "bfloat16", "cuda", "float32"),
        ("float64", "float32", "cpu", "float64"),
    ],
)
def test_a_gpu_serves_the_type_of_the_checkpoint_and_a_cpu_float32(
    dtype: str, saved: str | None, device: str, served: str
) -> None:
    assert choose_dtype(dtype, saved, device) == served


def test_the_type_is_the_one_of_the_config_or_of_its_text_model() -> None:
    config: Any = LlavaConfig()
    assert saved_dtype(config) is None
    config.text_config.dtype = torch.float16
    assert saved_dtype(config) == "float16"
    config.dtype = torch.bfloat16
    assert saved_dtype(config) == "bfloat16"


def test_a_tower_has_the_type_of_its_folder() -> None:
    assert dtype_of_folder(DEMO_MODEL, "auto", "cpu") == torch.float32
    assert dtype_of_folder(DEMO_MODEL, "auto", "cuda") == torch.float16

"""The check of generic families at start: right models pass it, and wrong ones do not."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from structlog.testing import capture_logs

from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models.language import LanguageAdapter
from tests import llava
from tests.models import test_generic, test_hybrids
from tests.models.test_generic import build
from tests.quantized_checkpoints import FORMS, Form, copy_quantized, mxfp4_experts
from workers.engine.loader import load
from workers.engine.model import check_folders
from workers.engine.model.flat_model import FlatModel
from workers.engine.model.self_check import check_against_whole

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.bfloat16, torch.float64]
SPECS = test_generic.SPECS | test_hybrids.SPECS
ALWAYS = test_generic.ALWAYS | {"qwen3_5_text"}
TYPES = [pytest.param(name, marks=() if name in ALWAYS else pytest.mark.long) for name in SPECS]


def check(model: Any, dtype: torch.dtype, adapter: Any = LanguageAdapter) -> None:
    check_against_whole(FlatModel(adapter(copy.deepcopy(model).to(dtype))), 8)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_tested_types_pass(model_type: str, dtype: torch.dtype) -> None:
    check(build(model_type, **SPECS[model_type]), dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_attention_of_another_form_is_refused(dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=r"'diffllama' differ from transformers' by"):
        check(build("diffllama"), dtype)


class Scaled(LanguageAdapter):
    def forward(self, embeddings: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(embeddings * 3, *args, **kwargs)


class Displaced(LanguageAdapter):
    def forward(self, embeddings: Any, positions: Any, *args: Any, **kwargs: Any) -> Any:
        return super().forward(embeddings, positions * 2, *args, **kwargs)


class WholeLogits(LanguageAdapter):
    def forward(
        self, embeddings: Any, positions: Any, sampled_rows: Any, *args: Any, **kwargs: Any
    ) -> Any:
        rows = torch.arange(embeddings.shape[1])
        return super().forward(embeddings, positions, rows, *args, **kwargs)


@pytest.mark.parametrize("adapter", [Scaled, Displaced, WholeLogits])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_other_logits_are_refused(adapter: type[LanguageAdapter], dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match="differ from transformers'"):
        check(build("gpt2" if adapter is Displaced else "glm"), dtype, adapter)


@pytest.mark.parametrize(
    ("model_type", "settings", "reason"),
    [
        ("doge", {"sliding_window": None}, "attention_mask of DogeAttention is not supported"),
        ("hrm_text", {}, "for layer 2, but transformers' layer has no attention"),
        ("jetmoe", {}, r"names 2 heads of 16 .* layer has 4 heads of 16"),
        ("moshi", {}, r"a window of 7 tokens for layer 0.*a window of None"),
        ("nemotron", {}, "NemotronAttention does not get the engine's cache"),
    ],
)
def test_attention_that_the_engine_does_not_have_is_refused(
    model_type: str, settings: dict[str, Any], reason: str
) -> None:
    with pytest.raises((ConfigError, NotImplementedError), match=reason):
        check(build(model_type, **settings), torch.float32)


def test_a_window_that_a_layer_ignores_is_refused() -> None:
    model: Any = build("olmo3")
    model.model.layers[0].self_attn.sliding_window = None
    with pytest.raises(ConfigError, match=r"a window of 7 tokens for layer 0.*a window of None"):
        check(model, torch.float32)


def write_folder(folder: Path, model_type: str, **settings: Any) -> None:
    """Write a tiny model with a tokenizer."""
    tokenizer = llava.make_tokenizer()
    tokenizer.save_pretrained(folder)
    settings |= {"vocab_size": len(tokenizer), "eos_token_id": tokenizer.eos_token_id}
    model: Any = build(model_type, **settings)
    model.float().save_pretrained(folder)


# The settings of the published gpt-oss.
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
EXPERTS = Form(MXFP4, mxfp4_experts, "MXFP4, groups of 32", ending="_proj")


@pytest.mark.parametrize(
    ("model_type", "form"),
    [
        ("cohere", FORMS["fp8_blocks"]),
        ("cohere", FORMS["awq"]),
        ("cohere", FORMS["packed_int4"]),
        ("gpt_oss", EXPERTS),
    ],
    ids=["fp8_blocks", "awq", "packed_int4", "gpt_oss"],
)
def test_a_quantized_folder_of_a_generic_type_is_served(
    model_type: str, form: Form, tmp_path: Path
) -> None:
    write_folder(tmp_path / "model", model_type)
    folder, twin = copy_quantized(tmp_path / "model", tmp_path, form)
    assert check_folders.examine(folder).stored_as == form.label
    served, expected = (
        load(ModelConfig(str(path)), EngineConfig(num_blocks=64)).model.family.model.state_dict()
        for path in (folder, twin)
    )
    assert all(torch.equal(weight, expected[name]) for name, weight in served.items())


@pytest.mark.parametrize("model_type", ["cohere", "diffllama"])
def test_folders_are_served_or_refused(tmp_path: Path, model_type: str) -> None:
    write_folder(tmp_path, model_type)
    report = check_folders.examine(tmp_path)
    source = "generic" if model_type == "cohere" else "generic, untested"
    assert (report.family, report.source, report.reason) == (model_type, source, None)
    config = ModelConfig(str(tmp_path)), EngineConfig(num_blocks=64)
    if model_type == "diffllama":
        with pytest.raises(ConfigError, match="needs a family"):
            load(*config)
        return
    with capture_logs() as logs:
        loaded = load(*config)
    assert isinstance(loaded.model, FlatModel)
    assert {"type": model_type, "source": source} in [
        {key: entry.get(key) for key in ("type", "source")}
        for entry in logs
        if entry["event"] == "generic_family"
    ]

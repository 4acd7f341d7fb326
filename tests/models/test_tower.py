"""A model in two parts: each alone is what it was in the whole, and nothing else is loaded."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, Qwen2VLForConditionalGeneration

from shared.errors import ConfigError, InvalidRequest
from shared.models.registry import find_model_class, find_tower
from shared.models.tower import load_tower
from shared.vision.weights import load_weights
from workers.settings import DEMO_MODEL


@pytest.fixture(scope="module")
def whole() -> Qwen2VLForConditionalGeneration:
    return Qwen2VLForConditionalGeneration.from_pretrained(DEMO_MODEL, dtype=torch.float32)


def image(num_patches: int = 64) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return {
        "pixel_patches": torch.randint(
            0, 256, (num_patches, 3, 196), generator=generator, dtype=torch.uint8
        ),
        "pixel_table": torch.linspace(-1, 1, 256).expand(3, 256).contiguous(),
        "image_grid_thw": torch.tensor([1, 8, num_patches // 8]),
    }


def test_a_tower_alone_sees_what_the_whole_model_sees(
    whole: Qwen2VLForConditionalGeneration,
) -> None:
    tower = load_tower(DEMO_MODEL, torch.float32, "cpu")
    pixel_values = tower.adapter.restore(image())  # type: ignore[attr-defined]
    with torch.inference_mode():
        expected = whole.get_image_features(pixel_values, torch.tensor([[1, 8, 8]])).pooler_output
    (embedding,) = tower.encode([image()])
    torch.testing.assert_close(embedding, expected[0], atol=1e-5, rtol=1e-5)
    assert embedding.shape == (tower.adapter.count(image()), tower.adapter.width)


def test_the_parts_share_no_weights_and_lack_none(whole: Qwen2VLForConditionalGeneration) -> None:
    config = AutoConfig.from_pretrained(DEMO_MODEL)
    adapter = find_tower(config)
    assert adapter is not None
    model_class = find_model_class(config)
    tower = load_tower(DEMO_MODEL, torch.float32, "cpu").model
    rest = load_weights(model_class, DEMO_MODEL, torch.float32, "cpu", adapter.modules)
    weights = dict(whole.named_parameters())
    of_tower, of_rest = dict(tower.named_parameters()), dict(rest.named_parameters())
    assert set(of_tower) | set(of_rest) == set(weights)
    assert not set(of_tower) & set(of_rest)
    for name, weight in (of_tower | of_rest).items():
        # A patch is embedded by a product of the same numbers, in another shape.
        assert torch.equal(weight.flatten(), weights[name].flatten())
    assert rest.get_output_embeddings().weight is rest.get_input_embeddings().weight
    assert all(name.startswith("model.visual.") for name in of_tower)
    assert adapter.language_modules == ("model.language_model", "lm_head")


def test_a_tower_whose_weights_are_missing_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder)
    (file,) = folder.glob("*.safetensors")
    weights = load_file(file)
    others = {name: weight for name, weight in weights.items() if "merger.mlp.2" not in name}
    assert len(others) < len(weights)
    save_file(others, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"merger\.mlp\.2"):
        load_tower(folder, torch.float32, "cpu")


@pytest.mark.parametrize(
    ("embedding", "complaint"),
    [
        (torch.zeros(15, 192), "expected"),
        (torch.zeros(16, 191), "expected"),
        (torch.zeros(16, 192, dtype=torch.int64), "expected"),
        (torch.zeros(16 * 192), "expected"),
        (torch.full((16, 192), float("nan")), "finite"),
    ],
)
def test_embeddings_of_others_are_looked_at(embedding: torch.Tensor, complaint: str) -> None:
    adapter = find_tower(AutoConfig.from_pretrained(DEMO_MODEL))
    assert adapter is not None
    metadata = {"image_grid_thw": torch.tensor([1, 8, 8])}
    adapter.check_embedding(metadata, torch.zeros(16, 192))
    with pytest.raises(InvalidRequest, match=complaint):
        adapter.check_embedding(metadata, embedding)

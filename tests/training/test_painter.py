"""The demo's painter: its files load, its drawings are as it was trained, and it knows colours."""

import numpy as np
import pytest

from ops.training.card import Score
from ops.training.folders import PAINTER, SEEING
from ops.training.painter import judging
from ops.training.painter.prompts import all_prompts, draw, other_words
from ops.training.painter.task import SCALE, SHAPE, SIZE, Drawings
from ops.training.seeing.evaluation import Folder
from shared.stage.pipelines import pipeline_of
from workers import settings
from workers.generator.core.denoising import ImageModel
from workers.generator.painter_model import load_painter

MIB = 1 << 20
SAMPLE = 10


@pytest.fixture(scope="module")
def painter() -> ImageModel:
    config = settings.load_config(PAINTER / "pagemill.yaml")
    stage = pipeline_of(config.models["painter"]).painter
    assert stage is not None
    return load_painter(PAINTER, "float32", stage.sizes, "the painter")


def test_the_painter_is_small() -> None:
    files = [file for file in PAINTER.rglob("*") if "__pycache__" not in file.parts]
    assert sum(file.stat().st_size for file in files if file.is_file()) < 8 * MIB


def test_every_prompt_fits_in_its_own_words_and_in_others(painter: ImageModel) -> None:
    drawings = Drawings(all_prompts(), 4, "test")
    for prompt in all_prompts():
        for text in (prompt.text, other_words(drawings.random, prompt)):
            assert painter.check_text(text, "prompt") <= SHAPE.max_text


def test_drawings_have_one_paint_for_the_shapes_and_one_for_the_background() -> None:
    drawings = Drawings(all_prompts(), 8, "test")
    for prompt in drawings.random.sample(all_prompts(), 20):
        drawn = np.asarray(draw(drawings.random, prompt, (60, 60))).reshape(-1, 3)
        colours, counts = np.unique(drawn, axis=0, return_counts=True)
        assert counts.max() > 0.4 * len(drawn)
        assert len(colours) >= 2
    batch = drawings.next(single_share=0.5)
    num_patches = batch.size[0] * batch.size[1] // SHAPE.patch**2
    assert batch.images.shape == (8, num_patches, 3 * SHAPE.patch**2)
    assert batch.text.shape == (8, SHAPE.max_text)


def test_held_out_prompts_are_painted_so_that_the_demo_model_reads_them(
    painter: ImageModel,
) -> None:
    prompts = judging.judged_prompts(200, 0)[:: 200 // SAMPLE]
    size = SIZE[0] * SCALE, SIZE[1] * SCALE
    images = judging.paint(painter, [prompt.text for prompt in prompts], size, 12, 1.5)
    score = judging.judge(Score("painted"), Folder(SEEING), prompts, images)
    assert score.right >= 0.7 * SAMPLE, score.mistakes

"""Expected images of the requests of a plan, each painted alone by a plain loop."""

import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ops.chaos.expected_answers import cached
from ops.chaos.fake_painter import FakePainter
from ops.chaos.plan import PAINTER, ROOT, Planned, Settings
from ops.plain_painting import paint_alone
from shared.config.schema import Config, ModelConfig
from shared.protocol.images import PaintParams, resolve_image
from shared.protocol.pipeline import StageSpec
from shared.stage.pipelines import pipelines_of
from workers.generator.core.denoising import ImageModel


def expect_images(
    settings: Settings, config: Config, planned: Sequence[Planned]
) -> dict[str, list[str]]:
    """Return the SHA-256 of the file of each image, by request id."""
    painted = [entry for entry in planned if entry.paints]
    if not painted:
        return {}
    name, model = next(iter(config.models.items()))
    stage = pipelines_of(config)[name].stage(PAINTER)
    assert stage is not None
    assert stage.path is not None
    files = sorted((ROOT / "workers" / "generator").rglob("*.py"))
    files += sorted(path for path in Path(stage.path).rglob("*") if path.is_file())
    return cached(
        settings,
        [painted, stage],
        files,
        dict[str, list[str]],
        lambda: _paint_all(settings, model, stage, painted),
    )


def _paint_all(
    settings: Settings, model: ModelConfig, stage: StageSpec, painted: Sequence[Planned]
) -> dict[str, list[str]]:
    painter: ImageModel = FakePainter()
    if settings.engine == "demo":
        from workers.generator.image_loader import load_image_model

        assert stage.path is not None
        painter = load_image_model(Path(stage.path), model.dtype, stage.sizes, PAINTER)

    @functools.cache
    def paint(prompt: str, params: PaintParams, number: int) -> str:
        return hashlib.sha256(paint_alone(painter, prompt, params, number)).hexdigest()

    digests = {}
    for entry in painted:
        request = entry.request
        params = resolve_image(request.image, stage.sampling_defaults, stage.sizes)
        alone = msgspec.structs.replace(params, n=1)
        digests[entry.id] = [paint(request.prompt or "", alone, n) for n in range(params.n)]
    return digests

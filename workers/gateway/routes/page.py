"""The web page at `/`. Its files are part of this package, and are sent unchanged.

The page is a client like any other. It loads nothing from elsewhere, and its content security
policy forbids what it does not need: inline scripts and styles, frames, forms that navigate, and
text that becomes markup.
"""

import json
from importlib.resources import files
from itertools import chain
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.config.schema import Config
from shared.models.image_registry import list_image_families
from shared.protocol.images import AUTO
from shared.protocol.pipeline import IMAGE_KIND, TEXT, VIDEO_KIND, StageSpec
from shared.stage.pipelines import pipelines_of
from workers.gateway.app import AppContext
from workers.gateway.http.auth import Caller
from workers.roles import role_of
from workers.settings import DEMO_MODEL

HEADERS = {
    "content-security-policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " media-src data: blob:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "cross-origin-opener-policy": "same-origin",
    # A cached module of another version would not fit the others.
    "cache-control": "no-cache",
}
MEDIA_TYPES = {
    "html": "text/html",
    "css": "text/css",
    "js": "text/javascript",
    "svg": "image/svg+xml",
}


def routes(context: AppContext) -> list[Route]:
    """Return the routes of `/` and of the files that it loads from `/page/`."""
    if not context.limits.page:
        return []
    folder = files("workers.gateway").joinpath("web")
    assets = ((file.name, file.read_bytes()) for file in sorted(folder.iterdir(), key=str))
    constants = {
        "STAGES": _stages(context.config),
        "LIMITS": _limits(context.config),
        "MODELS": _models(context.config),
    }
    lines = (f"export const {name} = {json.dumps(value)};\n" for name, value in constants.items())
    pipeline = ("pipeline.js", "".join(lines).encode())
    return [_route(context, name, content) for name, content in [*assets, pipeline]]


def _stages(config: Config) -> list[tuple[str, str, str]]:
    """Return name, title and purpose of the coordinator and of all stages of the pipelines."""
    specs = chain.from_iterable(pipeline.stages for pipeline in pipelines_of(config).values())
    stages = {"coordinator": "coordinator"} | {stage.name: stage.role for stage in specs}
    roles = {name: role_of(role) for name, role in stages.items()}
    return [
        (name, role.title if name == role.name else f"{role.title}: {name}", role.does)
        for name, role in roles.items()
    ]


def _models(config: Config) -> dict[str, dict[str, Any]]:
    """Return what each model makes. `/v1/models` has the media that it reads."""
    return {
        name: {
            "painter": _painter(stage, config.models[name].graph)
            if (stage := pipeline.painter or pipeline.video_maker) is not None
            and TEXT not in pipeline.outputs
            else None,
            "toy": Path(config.models[name].path).resolve().parent == DEMO_MODEL.parent,
        }
        for name, pipeline in pipelines_of(config).items()
    }


def _painter(stage: StageSpec, graph: str | None) -> dict[str, Any]:
    """Return the fields that the page has for a stage, with the stage's defaults."""
    family = next((family for family in list_image_families() if family.name == graph), None)
    has_negatives = family is None or family.empty_negative is not None
    is_guided = has_negatives or (family is not None and family.guidance > 0)
    fields = [
        "size",
        "n" if stage.video is None else "seconds",
        "steps",
        *(["guidance"] if is_guided else []),
        "seed",
        *(["negative_prompt"] if has_negatives else []),
    ]
    size = AUTO if stage.input_images else stage.sizes[0]
    return {
        "kind": IMAGE_KIND if stage.video is None else VIDEO_KIND,
        "input_images": stage.input_images,
        "sizes": list(dict.fromkeys([size, *stage.sizes])),
        "fields": fields,
        "defaults": {"size": size, "n": 1, **stage.sampling_defaults},
    }


def _limits(config: Config) -> dict[str, int]:
    """Return the limits that the page checks before it sends a request."""
    return {
        "maxImageBytes": config.renderer.max_image_bytes,
        "maxImagePixels": config.renderer.max_image_pixels,
        "maxImageSide": config.renderer.max_image_side,
        "maxAudioBytes": config.renderer.max_audio_bytes,
        "maxVideoBytes": config.renderer.max_video_bytes,
        "maxDocumentBytes": config.renderer.max_document_bytes,
        "maxBodyBytes": config.gateway.max_body_mib * 2**20,
        "maxBatchBytes": config.batch.max_file_mib * 2**20,
        "maxLineBytes": config.batch.max_line_mib * 2**20,
    }


def _route(context: AppContext, name: str, content: bytes) -> Route:
    media_type = MEDIA_TYPES[name.rpartition(".")[2]]

    async def send(_: Request, __: Caller) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return context.route("/" if name == "index.html" else f"/page/{name}", send, public=True)

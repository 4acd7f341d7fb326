"""The web page at `/`: files of this package, sent as they are.

The page is a client like any other. It loads nothing from elsewhere, and its policy forbids what it
does not need: inline scripts and styles, frames, forms that leave, and text made markup.
"""

from importlib.resources import files

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:;"
        " connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    # Of another version, a module would not fit to the others.
    "Cache-Control": "no-cache",
}
MEDIA_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}


def routes() -> list[Route]:
    """`/`, and what it needs under `/page/`."""
    folder = files("workers.gateway").joinpath("web")
    return [
        _route("/" if file.name == "index.html" else f"/page/{file.name}", file.read_bytes())
        for file in folder.iterdir()
        if file.name.rpartition(".")[2] in MEDIA_TYPES
    ]


def _route(path: str, content: bytes) -> Route:
    media_type = MEDIA_TYPES["html" if path == "/" else path.rpartition(".")[2]]

    async def send(_: Request) -> Response:
        return Response(content, headers=HEADERS, media_type=media_type)

    return Route(path, send, methods=["GET"], include_in_schema=False)

"""The page at `/`: static files without secrets."""

from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import FastAPI
from starlette.responses import FileResponse, Response

FOLDER = Path(__file__).parent.parent / "page"
SCRIPTS = (
    "page",
    "answer",
    "calls",
    "dom",
    "inline",
    "keep",
    "markdown",
    "marks",
    "show",
    "stream",
    "strip",
    "svg",
    "tree",
    "turn",
    "words",
)
FILES = {"/": "index.html", "/page.css": "page.css"} | {f"/{name}.js": f"{name}.js" for name in SCRIPTS}
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
HEADERS = {
    # No other origins, no inline scripts, no framing; the icon is a data: URL.
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; object-src 'none'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # revalidated, so that page and server have the same version
}


def page_routes(app: FastAPI) -> None:
    """Serve the page without a key. Its API requests use the key that the user types in."""
    for path, name in FILES.items():
        app.add_api_route(path, _sender(FOLDER / name), include_in_schema=False)


def _sender(file: Path) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(file, media_type=TYPES[file.suffix], headers=HEADERS)

    return send

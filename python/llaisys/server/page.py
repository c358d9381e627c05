"""The page at `/` and its assets: read once at the start, served from memory by exact path."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.errors import ApiError

PACKAGE = Path(__file__).resolve().parent.parent

# Where the page may be: the built one inside the package, else its sources beside a source tree.
PLACES = (PACKAGE / "webui", PACKAGE.parents[1] / "webui" / "src")

# Not `mimetypes`, which asks the machine; with `nosniff` a wrong type is a page without its script.
MEDIA_TYPES = {
    ".html": "text/html",
    ".js": "text/javascript",
    ".css": "text/css",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
}
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ASSET_CACHE = "public, max-age=31536000, immutable"

router = APIRouter()


@dataclass(frozen=True, slots=True)
class Asset:
    """One file of the page. `cache`: its Cache-Control."""

    content: bytes
    media_type: str
    cache: str


def load_page(places: tuple[Path, ...] = PLACES) -> dict[str, Asset]:
    """URL path -> file, of the first place that has an `index.html`; nothing if none has.

    Files under `assets/` of a build carry a hash in their name and may be kept for ever; sources may not.
    """
    for place in places:
        if (place / "index.html").is_file():
            cache = ASSET_CACHE if place == PLACES[0] else "no-cache"
            assets = {
                f"/assets/{path.name}": _asset(path, cache) for path in sorted(place.glob("assets/*.*"))
            }
            return {"/": _asset(place / "index.html", "no-cache"), **assets}
    return {}


def _asset(path: Path, cache: str) -> Asset:
    return Asset(path.read_bytes(), MEDIA_TYPES.get(path.suffix, "application/octet-stream"), cache)


@router.api_route("/", methods=["GET", "HEAD"])
@router.api_route("/assets/{name}", methods=["GET", "HEAD"])
async def page(request: Request) -> Response:
    """A file of the page; 404 for a name that is not one."""
    asset: Asset | None = request.app.state.page.get(request.scope["path"])
    if asset is None:
        message = "There is no such file in the page; `make build` builds it."
        raise ApiError(404, message, code="not_found")
    headers = {**SECURITY_HEADERS, "cache-control": asset.cache}
    return Response(asset.content, media_type=asset.media_type, headers=headers)

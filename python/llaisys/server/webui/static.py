"""Serves the web UI at `/` and its assets, which are read once at startup, from memory by exact path."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from llaisys.server.http_errors import ApiError

PACKAGE = Path(__file__).resolve().parents[2]

# Where `make build` and the wheel put the built web UI.
WEBUI_FOLDER = PACKAGE / "webui"

# Not `mimetypes`, which depends on the machine: with `nosniff`, a wrong type would disable the scripts.
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
    "font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types svelte-trusted-html dompurify"
)
GZIP_SUFFIX = ".gz"  # of the compressed form, which webui/vite.config.ts puts next to a file
SECURITY_HEADERS = {
    "content-security-policy": CONTENT_SECURITY_POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
}
ASSET_CACHE = "public, max-age=31536000, immutable"

NOT_BUILT = """<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>LLAISYS</title>
<h1>LLAISYS is running; its web UI is not built</h1>
<p>The API at <code>/v1</code> works. For the web UI, install the LLAISYS wheel, which includes it, or install
Node.js 20.19 or newer and run <code>make serve</code> again.
</html>
"""

log = logging.getLogger("llaisys.server")
router = APIRouter()


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. `cache`: its Cache-Control header. `gzipped`: None if the build did not compress the file."""

    content: bytes
    gzipped: bytes | None
    media_type: str
    cache: str


@cache
def load_webui(folder: Path = WEBUI_FOLDER) -> Mapping[str, Asset]:
    """Return URL path -> file; without a built web UI only `/`, a page with instructions to build it.

    Files under `assets/` have a hash in their name and may be cached forever. A folder is read once per
    process.
    """
    if not (folder / "index.html").is_file():
        log.warning(
            "the web UI is not built: install the wheel, or Node.js 20.19 and `make serve`; the API works"
        )
        return {"/": Asset(NOT_BUILT.encode(), None, "text/html", "no-cache")}
    assets = {
        f"/assets/{path.name}": _asset(path, ASSET_CACHE)
        for path in sorted(folder.glob("assets/*.*"))
        if path.suffix != GZIP_SUFFIX
    }
    return {"/": _asset(folder / "index.html", "no-cache"), **assets}


def _asset(path: Path, cache: str) -> Asset:
    gzipped = path.with_name(path.name + GZIP_SUFFIX)
    return Asset(
        path.read_bytes(),
        gzipped.read_bytes() if gzipped.is_file() else None,
        MEDIA_TYPES.get(path.suffix, "application/octet-stream"),
        cache,
    )


@router.api_route("/", methods=["GET", "HEAD"], include_in_schema=False)
@router.api_route("/assets/{name}", methods=["GET", "HEAD"], include_in_schema=False)
async def serve_asset(request: Request) -> Response:
    """Return a file of the web UI; 404 for an unknown name."""
    asset: Asset | None = request.app.state.webui.get(request.scope["path"])
    if asset is None:
        message = "The web UI has no such file; `make build` builds it."
        raise ApiError(404, message, code="not_found")
    headers = {**SECURITY_HEADERS, "cache-control": asset.cache, "vary": "accept-encoding"}
    content = asset.content
    if asset.gzipped is not None and "gzip" in request.headers.get("accept-encoding", ""):
        headers["content-encoding"] = "gzip"
        content = asset.gzipped
    return Response(content, media_type=asset.media_type, headers=headers)

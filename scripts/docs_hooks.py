"""Hooks of mkdocs: pages that live elsewhere in the repository, and links to files outside the site.

A page of `PAGES` is read where it is (ARCHITECTURE.md is on GitHub, too) and appears in the site at another
path. Links between pages keep working. A link to any other file of the repository becomes its path as code,
because the site has no such file. A link to a file that does not exist fails the build.
"""

from __future__ import annotations

import atexit
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
# Pages of the repository, and their paths in the site.
PAGES = {
    "ARCHITECTURE.md": "concepts/architecture.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/releases.md",
    "docs/decisions/README.md": "concepts/decisions.md",
    "benches/results/README.md": "performance/method.md",
    "benches/results/peers.md": "performance/peers.md",
    "benches/results/gpu-h100.md": "performance/gpu-h100.md",
    "benches/results/gpu-h200.md": "performance/gpu-h200.md",
}
_SOURCES = {site: source for source, site in PAGES.items()}
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_CODE = re.compile(r"(```.*?```|`[^`\n]+`)", re.S)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Assemble all pages in a temporary folder, where those of the repository have the site's paths."""
    folder = Path(tempfile.mkdtemp(prefix="llaisys-docs-"))
    atexit.register(shutil.rmtree, folder)
    shutil.copytree(ROOT / "docs", folder, dirs_exist_ok=True)
    for source, site in PAGES.items():
        (folder / site).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / source, folder / site)
    config.docs_dir = str(folder)
    return config


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Return the page with links that are right in the site."""
    site = page.file.src_uri
    source = _SOURCES.get(site, f"docs/{site}")
    parts = _CODE.split(markdown)
    parts[::2] = [_LINK.sub(lambda match: _link(match, source, site), part) for part in parts[::2]]
    return "".join(parts)


def _link(match: re.Match[str], source: str, site: str) -> str:
    is_image, label, link = match[1], match[2], match[3]
    path, _, anchor = link.partition("#")
    if not path or re.match(r"\w+:", link):
        return match[0]
    target = os.path.normpath(os.path.join(os.path.dirname(source), path))
    if not (ROOT / target).exists():
        raise PluginError(f"{source}: {target} does not exist")
    in_site = PAGES.get(target) or (target.removeprefix("docs/") if target.startswith("docs/") else None)
    if in_site is None:
        return f"{label} (`{target}`)" if label.strip("`") != target else f"`{target}`"
    relative = os.path.relpath(in_site, os.path.dirname(site) or ".")
    return f"{is_image}[{label}]({relative}{'#' + anchor if anchor else ''})"

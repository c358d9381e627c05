"""The page in a real browser against a real server: it streams a chat, stops, and shows errors."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect, sync_playwright

pytestmark = pytest.mark.model
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync", "--no-first-run"]


@pytest.fixture(scope="module")
def page(smollm2_server: str) -> Iterator[Page]:
    path = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))))
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        page = browser.new_page()
        page.goto(smollm2_server)
        yield page
        browser.close()

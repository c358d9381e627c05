"""The web UI in a real browser: the actions of a user, for tests."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import BrowserContext, Locator, Page, Route, expect

from waiting import block_until

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-sync",
    "--no-first-run",
]
COMPLETIONS = "**/v1/chat/completions"
RESPONSES = "**/v1/responses"

# A guard against a hang: a busy machine may take its time.
PATIENCE_MS = 120_000
# Toasts and "Copied" disappear after 1.5 and 8 seconds, on a busy machine before a test has checked them.
# Without these timers they stay.
STAY = """
(() => {
  const real = window.setTimeout;
  window.setTimeout = (run, ms, ...rest) => [1500, 8000].includes(ms) ? 0 : real(run, ms, ...rest);
})();
"""
# Resolves when the browser has stored everything that was written so far.
SETTLED = """
() => new Promise((done) => {
  indexedDB.open("llaisys").onsuccess = ({ target }) => {
    const db = target.result;
    const last = db.transaction([...db.objectStoreNames], "readwrite");
    last.oncomplete = () => { db.close(); done(); };
  };
})
"""

# Lets the test produce the stream of the next completion: `feed.text("...")`, `feed.end()`.
FEED = """
(() => {
  const real = window.fetch;
  const encoder = new TextEncoder();
  window.fetch = (url, options) => {
    if (!String(url).endsWith("/v1/chat/completions")) return real(url, options);
    const body = new ReadableStream({
      start(control) {
        const send = (data) => control.enqueue(encoder.encode(`data: ${data}\\n\\n`));
        window.feed = {
          text: (content) => send(JSON.stringify({ choices: [{ delta: { content } }] })),
          token: (token, logprob) => {
            const content = [{ token, logprob, bytes: [...encoder.encode(token)], top_logprobs: [] }];
            send(JSON.stringify({ choices: [{ delta: { content: token }, logprobs: { content } }] }));
          },
          reasoning: (text) => send(JSON.stringify({ choices: [{ delta: { reasoning_content: text } }] })),
          end: () => { send("[DONE]"); control.close(); },
        };
        const stop = () => control.error(new DOMException("stopped", "AbortError"));
        options.signal.addEventListener("abort", stop);
      },
    });
    return Promise.resolve(new Response(body, { headers: { "content-type": "text/event-stream" } }));
  };
})();
"""

# Of a list that scrolls: where its view is, and whether its end is in view. Heights are rounded.
SCROLL_TOP = "(list) => list.scrollTop"
AT_END = "(list) => list.scrollTop > 0 && list.scrollHeight - list.scrollTop - list.clientHeight <= 1"

# Counts nodes that are added or removed in completions.
# `window.touched()` returns the count since its last call.
COUNT = """
() => {
    let touched = 0;
    const inside = (node) => 1 + (node.querySelectorAll?.("*").length ?? 0);
    const size = (nodes) => [...nodes].reduce((sum, node) => sum + inside(node), 0);
    const count = (records) => {
        for (const record of records) {
            touched += record.type === "childList" ? size(record.addedNodes) + size(record.removedNodes) : 1;
        }
    };
    const observer = new MutationObserver(count);
    observer.observe(document.querySelector("main"), { subtree: true, childList: true, characterData: true });
    window.touched = () => {
        count(observer.takeRecords());
        const now = touched;
        touched = 0;
        return now;
    };
}
"""

# Remembers all nodes under these elements. `window.lost()` returns how many of them left the page or changed.
REMEMBER = """
(elements) => {
    const all = elements.flatMap((element) => [element, ...element.querySelectorAll("*")]);
    let n = 0;
    const count = (records) => { n += records.length; };
    const observer = new MutationObserver(count);
    const what = { subtree: true, childList: true, characterData: true, attributes: true };
    for (const element of elements) observer.observe(element, what);
    window.lost = () => {
        count(observer.takeRecords());
        return n + all.filter((node) => !node.isConnected).length;
    };
    return all.length;
}
"""


def find_browser() -> str | None:
    """Return the path of an installed Chromium, or None for Playwright's own.

    The shell without windows comes first: a page opens in half of the time.
    """
    installed = map(
        shutil.which, ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
    )
    return next(filter(None, installed), None)


@dataclass
class Chat:
    """A page of a browser context. `complaints`: its console messages, with violations of the policy."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)

    @staticmethod
    def open(context: BrowserContext, url: str, *, feed: bool = False) -> Chat:
        """Open the page of a server and wait for its model. `feed`: the test produces the streams."""
        chat = Chat(context.new_page(), url)
        chat.page.on("console", lambda message: chat.complaints.append(message.text))
        chat.page.on("pageerror", lambda error: chat.complaints.append(str(error)))
        chat.page.set_default_timeout(PATIENCE_MS)
        chat.page.add_init_script(STAY)
        if feed:
            chat.page.add_init_script(FEED)
        chat.page.goto(url)
        chat.mounted()
        return chat

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Wait until the condition holds; the page's callbacks run meanwhile."""
        block_until(condition, lambda pause_s: self.page.wait_for_timeout(1000 * pause_s))

    def scroll_up(self, list_: Locator, px: int) -> int:
        """Scroll a list up by the wheel; return the position of its view once the animation has ended.

        Playwright hovers after two frames, in which new rows get their heights and move the end of the list.
        Nothing else may change the height of the list or of its view meanwhile.
        """
        list_.hover()
        top_px = int(list_.evaluate(SCROLL_TOP)) - px
        self.page.mouse.wheel(0, -px)
        # A busy machine may show no step of the animation for many frames.
        self.wait_for(lambda: list_.evaluate(SCROLL_TOP) == top_px)
        return top_px

    def mounted(self) -> None:
        expect(self.page.get_by_label("Model", exact=True)).to_be_visible()

    def settle(self) -> None:
        """Wait until the browser has stored what the page has written, so that it outlives the page."""
        self.page.evaluate(SETTLED)

    def reload(self) -> None:
        """Reload the page and wait until it handles keys."""
        self.settle()
        self.page.reload()
        self.mounted()

    @property
    def message(self) -> Locator:
        return self.page.get_by_role("textbox", name="Message", exact=True)

    @property
    def completions(self) -> Locator:
        return self.page.get_by_role("article", name="Assistant")

    @property
    def completion(self) -> Locator:
        """Return the last completion."""
        return self.completions.last

    @property
    def text(self) -> Locator:
        """Return the text of the last completion."""
        return self.completion.locator(".prose").last

    @property
    def user_messages(self) -> Locator:
        return self.page.get_by_role("article", name="You")

    @property
    def user_texts(self) -> Locator:
        """Return the texts of the user messages."""
        return self.user_messages.locator(".bubble")

    @property
    def sessions(self) -> Locator:
        return self.page.get_by_role("navigation", name="Chats").get_by_role("link")

    @property
    def meter(self) -> Locator:
        """Return the context bar."""
        return self.page.get_by_role("meter", name="Context")

    def button(self, name: str) -> Locator:
        return self.page.get_by_role("button", name=name, exact=True)

    def send(self, text: str) -> None:
        self.message.fill(text)
        self.message.press("Enter")

    def done(self) -> None:
        """Wait for the end of the completion."""
        expect(self.button("Send")).to_be_visible()

    def menu(self, title: str, action: str) -> None:
        """Choose an action in the menu of a chat."""
        row = self.page.get_by_role("navigation", name="Chats").get_by_role("listitem").filter(has_text=title)
        row.hover()
        row.get_by_role("button", name=re.compile("^Actions for")).click()
        self.page.get_by_role("menuitem", name=action, exact=True).click()

    def import_text(self, name: str, text: str) -> None:
        """Import a file with this content into the list of chats."""
        file = {"name": name, "mimeType": "text/plain", "buffer": text.encode()}
        self.page.locator("input[type=file]").set_input_files(file)

    def with_fields(self, url: str = COMPLETIONS, **fields: Any) -> None:
        """Add fields to every request to this URL of the server."""

        def patch(route: Route) -> None:
            route.continue_(post_data=json.dumps({**route.request.post_data_json, **fields}))

        self.page.route(url, patch)

    def complete_with(self, *pieces: str | Mapping[str, Any], finish: str = "stop") -> None:
        """Respond to every chat with these deltas instead of the server; a text is a `content`."""
        deltas = [{"content": piece} if isinstance(piece, str) else dict(piece) for piece in pieces]
        chunks: list[Any] = [{"choices": [{"delta": delta}]} for delta in deltas]
        chunks.append({"choices": [{"delta": {}, "finish_reason": finish}]})
        usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 5}}
        chunks.append({"choices": [], "usage": usage})
        body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
        self._fulfill(body=body, headers={"content-type": "text/event-stream"})

    def fail_with(self, status: int, code: str, message: str, **headers: str) -> None:
        """Respond to every chat with this error instead of the server."""
        body = json.dumps({"error": {"message": message, "type": "x", "param": None, "code": code}})
        self._fulfill(status=status, body=body, headers={"content-type": "application/json", **headers})

    def _fulfill(self, **response: Any) -> None:
        # The newest route wins. Without any, the next request could pass before interception is on again.
        self.page.route(COMPLETIONS, lambda route: route.fulfill(**response))

    def reach_server(self) -> None:
        """Undo the above: requests reach the server."""
        self.page.unroute(COMPLETIONS)

    def feed(self, *texts: str) -> None:
        """Send pieces of the completion on a page with `feed=True`, one per frame."""
        self.page.evaluate(
            """async (texts) => {
                const frame = () => new Promise((done) => requestAnimationFrame(done));
                while (!window.feed) await frame();
                for (const text of texts) {
                    feed.text(text);
                    await frame();
                    await frame();
                }
            }""",
            list(texts),
        )

    def end(self) -> None:
        """End a completion that the test produces."""
        self.page.evaluate("feed.end(); window.feed = null")
        self.done()

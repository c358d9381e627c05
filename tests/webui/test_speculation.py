"""The details of a completion say how many drafts were accepted."""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import BrowserContext, expect

from chatpage import Chat
from serving import serving

QUESTION = "Write the sentence 'the quick brown fox jumps over the lazy dog' ten times."


def test_accepted_drafts_are_shown(context: BrowserContext, tmp_path_factory: pytest.TempPathFactory) -> None:
    flags = ("--num-kv-cells", "4096", "--speculative-config", '{"method": "suffix"}')
    with serving(tmp_path_factory.mktemp("speculative"), "smollm2", *flags) as server:
        chat = Chat.open(context, server.url)
        chat.with_fields(temperature=0, max_tokens=80)
        chat.send(QUESTION)
        chat.done()
        accepted = server.metric("vllm:spec_decode_num_accepted_tokens_total")
        drafted = server.metric("vllm:spec_decode_num_draft_tokens_total")
        assert accepted > 0
        shown = f"{accepted:.0f} of {drafted:.0f} drafts accepted"
        expect(chat.completion.locator(".usage")).to_contain_text(shown)
        chat.completion.locator(".time summary").click()
        expect(chat.completion.locator(".time")).to_contain_text(
            f"{accepted:.0f} of {drafted:.0f} draft tokens were accepted"
        )
        chat.reload()
        expect(chat.completion.locator(".usage")).to_contain_text(re.compile("drafts accepted"))
        assert chat.complaints == []

"""Bodies: a million wrong items, large sizes, nesting, numbers, encodings."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from attack.target import Group, Target

GROUP = Group("bodies")
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
REFUSED = (400, 413, 422, 429)


def _post(name: str, path: str, body: Any, *allowed: int | None) -> None:
    def lazily(target: Target) -> Any:
        return target.post(path, body() if callable(body) else body)

    GROUP.one(name, lazily, *(allowed or REFUSED))


def chat(**fields: Any) -> dict[str, Any]:
    return {"messages": MESSAGES, "max_tokens": 1, **fields}


def _repeated(base: dict[str, Any], field: str, item: Any, n: int) -> Callable[[], bytes]:
    """Return a function that makes a body with `n` times the item in one list."""
    return lambda: json.dumps({**base, field: [item] * n}, separators=(",", ":")).encode()


# A million wrong items in each list, in the shortest JSON.
WRONG: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "chat": (
        CHAT,
        chat(),
        ["messages", "stop", "tools", "stop_token_ids", "bad_words", "guided_choice", "allowed_token_ids"],
    ),
    "completions": (COMPLETIONS, {"prompt": "hi", "max_tokens": 1}, ["prompt", "stop", "stop_token_ids"]),
    "embeddings": ("/v1/embeddings", {}, ["input"]),
    "detokenize": ("/detokenize", {}, ["tokens"]),
    "tokenize": ("/tokenize", {}, ["messages"]),
}
for endpoint, (where, base, lists) in WRONG.items():
    for field in lists:
        for kind, item in (("nulls", None), ("numbers", 0.5), ("objects", {}), ("texts", "")):
            if (kind, field) in (("objects", "tools"), ("objects", "messages")) or kind in (
                "nulls",
                "numbers",
            ):
                n = 900_000 if kind != "objects" else 60_000
                _post(f"{endpoint}_{field}_of_{n}_{kind}", where, _repeated(base, field, item, n))

_post("logit_bias_of_100000_keys", CHAT, lambda: chat(logit_bias={f"k{i}": 0 for i in range(100_000)}))
_post("100000_unknown_fields", CHAT, lambda: chat(**{f"f{i}": 0 for i in range(100_000)}), 200, *REFUSED)
_post("content_of_30000_parts", CHAT, lambda: chat(messages=[{"role": "user", "content": [{}] * 30_000}]))
_post("tool_of_50000_properties", CHAT, lambda: chat(tools=[_tool(50_000)], tool_choice="required"))
_post("5000_tools", CHAT, lambda: chat(tools=[_tool(1)] * 5_000))
_post(
    "template_kwargs_of_60000",
    CHAT,
    lambda: chat(chat_template_kwargs={f"k{i}": 0 for i in range(60_000)}),
    200,
    *REFUSED,
)
_post("a_million_token_ids", COMPLETIONS, lambda: {"prompt": [1] * 1_000_000})
_post("129_prompts", COMPLETIONS, {"prompt": ["a"] * 129})
_post("65_inputs_of_nothing", "/v1/embeddings", {"input": [[]] * 65})
_post("model_of_a_megabyte", CHAT, lambda: chat(model="m" * (1 << 20)), 400, 404)
_post("user_of_a_megabyte", CHAT, lambda: chat(user="u" * (1 << 20)), 200, *REFUSED)
_post("role_of_a_megabyte", CHAT, lambda: {"messages": [{"role": "r" * (1 << 20), "content": "a"}]})
_post("content_of_3_megabytes", CHAT, lambda: {"messages": [{"role": "user", "content": "a b " * (3 << 18)}]})
_post("one_word_of_3_megabytes", CHAT, lambda: {"messages": [{"role": "user", "content": "a" * (3 << 20)}]})
_post("request_id_of_a_megabyte", CHAT, lambda: chat(request_id="r" * (1 << 20)))
_post("cache_salt_of_a_megabyte", CHAT, lambda: chat(cache_salt="s" * (1 << 20)))
_post("stop_of_a_megabyte", CHAT, lambda: chat(stop="s" * (1 << 20)))
_post("body_over_the_limit", CHAT, lambda: b" " * (5 << 20), 413, None)
_post("number_of_a_million_digits", CHAT, lambda: b'{"messages":[],"max_tokens":' + b"9" * 1_000_000 + b"}")
_post("number_beyond_floats", CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":1e999}')
_post("not_a_number", CHAT, b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}')
_post("negative_max_tokens", CHAT, chat(max_tokens=-1))
_post("max_tokens_of_2_to_the_70", CHAT, chat(max_tokens=2**70))
_post("seed_of_2_to_the_70", CHAT, chat(seed=2**70))
_post("four_million_brackets", CHAT, lambda: b"[" * (4 << 20))
_post("two_million_empty_lists", CHAT, lambda: b'{"messages":[' + b"[]," * 1_300_000 + b"[]]}")
_post("nested_100000_deep", CHAT, lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000)
_post("nested_in_messages", CHAT, lambda: b'{"messages":' + b"[" * 5_000 + b"]" * 5_000 + b"}")
_post("half_a_surrogate", CHAT, b'{"messages":[{"role":"user","content":"\\ud800"}],"max_tokens":1}')
_post("invalid_utf_8", CHAT, b'{"messages":[{"role":"user","content":"\xff\xfe"}]}')
_post("utf_16", CHAT, json.dumps(chat()).encode("utf-16"), 200, *REFUSED)
_post("byte_order_mark", CHAT, b"\xef\xbb\xbf" + json.dumps(chat()).encode(), 200, *REFUSED)
_post("no_json", CHAT, b"hello")
_post("an_empty_body", CHAT, b"")
_post("a_list", CHAT, b"[]")
_post("a_key_twice", CHAT, b'{"messages":[{"role":"user","content":"a"}],"max_tokens":1,"max_tokens":1}', 200)
_post("chat_put_of_3_megabytes", "/v1/chats/a", lambda: {"base": 0, "chat": {"a": "b" * (3 << 20)}}, 404, 405)


def _tool(n_properties: int) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n_properties)}}
    return {"type": "function", "function": {"name": "f", "parameters": parameters}}

"""A text process: renders templates, (de)tokenises and reads bodies for a server, one job after the other.

Started by TextPool only. It is there to be killed: each job has an allowance of CPU time, whose end is the
end of the process (SIGPROF), and of memory. Its input and its errors' texts are prompts, so it logs nothing.
"""

from __future__ import annotations

import json
import marshal
import os
import resource
import signal
from array import array
from multiprocessing.connection import Connection
from typing import Any

from llaisys.body import read_body
from llaisys.errors import LlaisysError
from llaisys.text.template import ChatTemplate, TemplateSource
from llaisys.text.tokenizer import Tokenizer, tokenizer_of_json

# The allowance of a job of n bytes: tokenising takes 0.6 to 0.8 s and 130 to 220 MB for a megabyte of text.
CPU_S, CPU_S_PER_BYTE = 2.0, 4e-6
MEMORY_BYTES, MEMORY_BYTES_PER_BYTE = 512 << 20, 512
_PAGE = resource.getpagesize()

# A model's tokenizer and chat template.
Kit = tuple[Tokenizer, ChatTemplate | None]


def main(number: int, cpu_s: float) -> None:
    """Serves the socket of this number until its other end is closed; `cpu_s`: each job's, at least.

    A job is `(name, kit, arguments)`, its answer `("ok", value)`, or what went wrong: `("error", class,
    message, param)`, `("json", position)`, `("memory",)` or `("failed", class)`; all by marshal.
    """
    for signal_number in (signal.SIGINT, signal.SIGTERM):  # the server's to answer
        signal.signal(signal_number, signal.SIG_IGN)
    line = Connection(number)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic of a library may show its input
    kits: dict[int, Kit] = {}
    try:
        line.send_bytes(marshal.dumps(("ok", None)))
        while True:
            raw = line.recv_bytes()
            answer = marshal.dumps(_answer(kits, raw, cpu_s))
            del raw
            line.send_bytes(answer)
    except (EOFError, OSError):
        return


def _answer(kits: dict[int, Kit], raw: bytes, cpu_s: float) -> tuple[Any, ...]:
    try:
        _allow(len(raw), cpu_s)
        return ("ok", _done(kits, *marshal.loads(raw)))
    except json.JSONDecodeError as e:
        return ("json", e.pos)
    except LlaisysError as e:
        return ("error", type(e).__name__, str(e), e.param)
    except MemoryError:
        return ("memory",)
    except Exception as e:  # noqa: BLE001 -- reported by its class; its text may be the prompt's
        return ("failed", type(e).__name__)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        resource.setrlimit(resource.RLIMIT_AS, _hard(resource.RLIM_INFINITY))


def _allow(n_bytes: int, cpu_s: float) -> None:
    """Allowances for what comes next; address space is counted from what is in use now."""
    with open("/proc/self/statm", "rb") as file:
        used = int(file.read().split(maxsplit=1)[0]) * _PAGE
    resource.setrlimit(resource.RLIMIT_AS, _hard(used + MEMORY_BYTES + n_bytes * MEMORY_BYTES_PER_BYTE))
    signal.setitimer(signal.ITIMER_PROF, cpu_s + n_bytes * CPU_S_PER_BYTE)


def _hard(soft: int) -> tuple[int, int]:
    """A soft limit under the process's hard one, which cannot be raised again."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard != resource.RLIM_INFINITY:
        soft = hard if soft == resource.RLIM_INFINITY else min(soft, hard)
    return soft, hard


def _done(kits: dict[int, Kit], name: str, kit: int, arguments: tuple[Any, ...]) -> Any:
    match name:
        case "kit":
            return _load(kits, kit, *arguments)
        case "json":
            return read_body(*arguments)
        case "encode":
            return _packed(kits[kit][0].encode(*arguments))
        case "decode":
            packed, skip_special_tokens = arguments
            return kits[kit][0].decode(array("I", packed).tolist(), skip_special_tokens)
        case "chat":
            return _packed(_chat(kits[kit], *arguments))
    raise ValueError(name)


def _load(
    kits: dict[int, Kit], kit: int, tokenizer: str, texts: dict[str, str] | None, special: dict[str, str]
) -> None:
    template = None if texts is None else ChatTemplate(TemplateSource(texts, special))
    kits[kit] = (tokenizer_of_json(tokenizer), template)
    kits[kit][0].encode("Hello, world", add_special_tokens=True)  # builds what is built at the first use


def _chat(
    kit: Kit, messages: list[Any], options: dict[str, Any], add_special_tokens: bool, n_most: int | None
) -> list[int]:
    tokenizer, template = kit
    assert template is not None
    return tokenizer.encode(template.render(messages, **options), add_special_tokens, n_most)


def _packed(ids: list[int]) -> bytes:
    return array("I", ids).tobytes()

"""`llaisys chat`: a conversation in the terminal, with a model in this process or behind a running server."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from llaisys.cli.config_flags import CLIENT_SETTINGS, add_config_flags, config_of, overrides_of
from llaisys.cli.parsing import Commands, add_command
from llaisys.cli.sampling_flags import add_sampling_flags, sampling_of
from llaisys.errors import EngineDeadError, LlaisysError

HELP = "/clear starts a new conversation, /exit (or Ctrl-D) quits, Ctrl-C stops a completion"


class ChatModel(Protocol):
    """A model that completes conversations."""

    def chat(
        self, messages: Sequence[Mapping[str, Any]], fields: Mapping[str, Any], show: Callable[[str], None]
    ) -> None:
        """Stream the next message to `show`. Raises KeyboardInterrupt after Ctrl-C."""


def add_parser(commands: Commands) -> None:
    """Add `llaisys chat [MODEL]`."""
    parser = add_command(
        commands,
        "chat",
        "talk to a model in the terminal",
        """
        llaisys chat
        llaisys chat path/to/model --temperature 0.7 --system "You are brief."
        llaisys chat --url http://127.0.0.1:8000
        """,
    )
    parser.add_argument(
        "--url", help="URL of a running server to use (MODEL and --api-key are the server's then)"
    )
    parser.add_argument("--system", metavar="TEXT", help="the system message")
    add_sampling_flags(parser)
    add_config_flags(parser, CLIENT_SETTINGS)


def run(arguments: argparse.Namespace) -> int:
    """Read messages from stdin, one per line, until its end."""
    with _model(arguments) as model:
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                importlib.import_module("readline")  # line editing and history for input()
            print(HELP)
        Conversation(model, sampling_of(arguments), arguments.system).run()
    return 0


@contextmanager
def _model(arguments: argparse.Namespace) -> Iterator[ChatModel]:
    config = config_of(arguments)
    if arguments.url is not None:
        from llaisys.cli.remote_model import RemoteModel

        name = overrides_of(arguments).get("model", "default")
        yield RemoteModel(arguments.url, config.api_key[0] if config.api_key else "", name)
    else:
        from llaisys.cli.local_model import LocalModel

        with LocalModel(config) as model:
            yield model


class Conversation:
    """The messages of a conversation, and the loop that adds to them."""

    def __init__(self, model: ChatModel, fields: Mapping[str, Any], system: str | None) -> None:
        self._model = model
        self._fields = fields
        self._start = [] if system is None else [{"role": "system", "content": system}]
        self._messages: list[dict[str, str]] = list(self._start)

    def run(self) -> None:
        """Run until the end of stdin, `/exit`, or Ctrl-C at the prompt."""
        prompt = "> " if sys.stdin.isatty() else ""
        while True:
            try:
                line = input(prompt).strip()
            except (EOFError, KeyboardInterrupt):
                return
            match line:
                case "":
                    continue
                case "/exit":
                    return
                case "/clear":
                    self._messages = list(self._start)
                case "/help":
                    print(HELP)
                case _:
                    self._complete(line)

    def _complete(self, line: str) -> None:
        """Add a user message and its completion, even a partial one; drop a message without a completion.

        Raises EngineDeadError if the engine is dead.
        """
        pieces: list[str] = []

        def show(text: str) -> None:
            pieces.append(text)
            print(text, end="", flush=True)

        self._messages.append({"role": "user", "content": line})
        try:
            self._model.chat(self._messages, self._fields, show)
        except KeyboardInterrupt:
            pass
        except EngineDeadError:
            raise
        except LlaisysError as e:
            print(f"llaisys chat: {e}", file=sys.stderr)
        if any(pieces):
            self._messages.append({"role": "assistant", "content": "".join(pieces)})
            print()
        else:
            self._messages.pop()

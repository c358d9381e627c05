"""An engine process that follows the protocol and dies at a chosen point: `main(SOCKET, POINT)`."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import NoReturn

from llaisys.engine.messages import EngineEnded, Shutdown, Start, Started, Submit, decode_to_engine, encode
from llaisys.errors import EngineDeadError
from llaisys.ipc import Channel

EXIT_CODE = 7


def die(point: str) -> NoReturn:
    print(f"dying {point}", file=sys.stderr, flush=True)
    os._exit(EXIT_CODE)


def main(number: int, point: str) -> None:
    if point == "at once":
        die(point)
    channel = Channel.inherited(number)
    if point == "never":
        print("here, and silent", file=sys.stderr, flush=True)
        time.sleep(600)
    while True:
        for raw in channel.receive():
            match decode_to_engine(raw):
                case Start() as start:
                    if point == "during load":
                        die(point)
                    if point == "during load, killed":
                        os.kill(os.getpid(), signal.SIGKILL)
                    channel.send(encode(Started(start.limits)))
                    if point == "with messages queued":
                        time.sleep(600)  # reads nothing more until it is killed
                case Submit():
                    if point == "with its socket closed":  # and keeps running
                        channel.close()
                        time.sleep(600)
                    channel.send(encode(EngineEnded(EngineDeadError("its last word"))))
                    if point == "after its last word":
                        die(point)
                    if point == "never, after its last word":
                        time.sleep(600)
                case Shutdown():
                    die(point)

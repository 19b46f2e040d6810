"""SIGTERM and Ctrl-C: finish the step, save, leave. The second signal leaves at once."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from trainer.loop import Stop

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
    """Whether a signal has asked the run to stop.

    Attributes:
      stop: since the first signal, the end that it asks for.
    """

    def __init__(self) -> None:
        self.stop: Stop | None = None

    def handle(self, number: int, frame: FrameType | None) -> None:
        """The signal handler."""
        if self.stop is not None:
            os._exit(128 + number)  # What is on disk is complete: every file there is renamed into place.
        self.stop = Stop(f"stopped by {signal.Signals(number).name}", finished=False)


@contextlib.contextmanager
def listen() -> Iterator[StopRequest]:
    """Collects stop signals while the context lasts; only the main thread can, elsewhere none is ever received."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.signal(number, request.handle) for number in _SIGNALS}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

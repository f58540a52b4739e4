"""A function that pauses in mid-call and goes on later, while others run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class _Closed(BaseException):
    """Ends what will not be gone on with."""


class Lane(Generic[T]):
    """A call in a thread of its own, which runs while ``resume`` waits for it and no longer.

    A thread because a model's forward is an ordinary function, which cannot yield.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._go = threading.Semaphore(0)
        self._back = threading.Semaphore(0)
        # A paused one must not hold up the end of the program.
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._closed = False
        self._results: list[T] = []
        self._error: BaseException | None = None
        self._thread.start()

    def resume(self) -> None:
        """Run until the function pauses or ends; raises what it raises."""
        self._go.release()
        self._back.acquire()
        if self._error is not None:
            raise self._error

    def pause(self) -> None:
        """Called within the function: have ``resume`` return, until the next one."""
        self._back.release()
        self._go.acquire()
        if self._closed:
            raise _Closed

    def take(self) -> T:
        """Return what the function has returned; it has ended."""
        (result,) = self._results
        self._thread.join()
        return result

    def close(self) -> None:
        """Give the function up, wherever it is."""
        self._closed = True
        self._go.release()
        self._thread.join()

    def _run(self) -> None:
        self._go.acquire()
        try:
            if not self._closed:
                self._results.append(self._function())
        except _Closed:
            pass
        except BaseException as error:
            self._error = error
        self._back.release()

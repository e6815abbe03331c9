"""Dropping the locals of finished frames, which hold buffers for as long as somebody holds an exception."""

from __future__ import annotations

from inspect import CO_ASYNC_GENERATOR, CO_COROUTINE, CO_GENERATOR
from types import FrameType
from typing import Any, Optional


def drop_locals(error: BaseException) -> None:
    """Clears the finished frames of ``error`` and of what it was raised from."""
    chain: list[BaseException] = []
    pending: list[Optional[BaseException]] = [error]
    while pending:
        link = pending.pop()
        if link is not None and link not in chain:
            chain.append(link)
            pending += [link.__cause__, link.__context__]
    for link in chain:
        trace = link.__traceback__
        # Frames that called into the traceback and have returned since stay linked to it, with their locals.
        frame = trace.tb_frame.f_back if trace is not None else None
        while frame is not None and _clear(frame):
            frame = frame.f_back
        while trace is not None:
            _clear(trace.tb_frame)
            trace = trace.tb_next


def drop_failed_collective(manager: Any) -> None:
    """Clears what the Manager keeps of a failed collective.

    It keeps the exception until the next quorum, and a log handler may for longer; the frames hold the
    window. A second failure replaces the first, so this is to be called after each place that may fail.

    Args:
        manager: the Manager; a stand-in for one may have no ``errored()``.
    """
    failure = failure_of(manager)
    if failure is not None:
        drop_locals(failure)


def failure_of(manager: Any) -> Optional[BaseException]:
    """Returns the exception because of which the Manager is going to vote no, None without one."""
    errored = getattr(manager, "errored", None)
    failure = getattr(errored() if callable(errored) else None, "original_exception", None)
    return failure if isinstance(failure, BaseException) else None


def _clear(frame: FrameType) -> bool:
    """Clears the locals of a frame; returns False if it is still running, as all its callers are then."""
    if frame.f_code.co_flags & (CO_GENERATOR | CO_COROUTINE | CO_ASYNC_GENERATOR):
        # It may be suspended, a user's watchdog say, and clearing would end it.
        return True
    try:
        frame.clear()
    except RuntimeError:
        return False
    # Whoever looked at the locals, a debugger or a log handler that shows them, has left a dictionary of them
    # in the frame; to look once more makes it the one of a frame without locals.
    _ = frame.f_locals
    return True

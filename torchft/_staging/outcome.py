"""Where a synchronization was left, whether another one may start, and why one was rejected."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any, Optional
from weakref import WeakKeyDictionary

from torchft._staging.frames import failure_of

# Places at which a synchronization can be left, as the refusal of the next one names them.
IN_QUORUM = "in its quorum, perhaps half healed"
BEFORE_VOTE = "before its commit vote"
IN_VOTE = "in its commit vote"
IN_WRITE_BACK = "in the middle of write-back"
CHANGED = "with a commit that the model could not take over, as its parameters were others by then"

# After so many in a row it is time to say what usually is wrong.
_MANY = 3
_USUAL_CAUSES = (
    "usual causes: a process group that cannot take the parameters' device, a network interface or host name "
    "that the other groups can't reach (GLOO_SOCKET_IFNAME, the hostname of the Manager), groups whose "
    "models or sync_every differ, and time-outs shorter than an all-reduce takes"
)


class Outcome:
    """What is known of the synchronizations of a Manager, by whichever LocalSGD.

    Attributes:
        at: where the synchronization under way is, or where one was left by an exception with nobody knowing
            what became of it; None: nothing is open. It is set before something begins and cleared after its
            end, so that whatever ends it in between, Ctrl-C included, leaves it set.
    """

    def __init__(self) -> None:
        self.at: Optional[str] = None
        self._rejections = 0

    @classmethod
    def of(cls, manager: Any) -> Outcome:
        """Returns the outcome that belongs to a Manager.

        A script that catches an exception and makes another LocalSGD goes on with the same Manager and the
        same, perhaps torn, model.
        """
        try:
            return _OUTCOMES.setdefault(manager, cls())
        except TypeError:
            # A stand-in that has no hash or can't be referred to weakly.
            return cls()

    def check(self, *under_way: str) -> None:
        """Refuses another synchronization after one that was left.

        Args:
            under_way: where the synchronization that asks may be itself.

        Raises:
            RuntimeError: an earlier one was left without a known outcome.
        """
        if self.at is not None and self.at not in under_way:
            raise RuntimeError(
                f"an earlier synchronization was left {self.at}; another one could pair its collectives with "
                "new ones or spread half-written parameters. End this process and start it again, so that it "
                "heals from a peer"
            )

    def committed(self) -> None:
        """Notes a commit."""
        self._rejections = 0

    def rejected(self, manager: Any) -> str:
        """Notes a rejection.

        Args:
            manager: the Manager that has voted, for the reason.

        Returns:
            Why, in words, and, from the third rejection in a row on, what usually is wrong then.
        """
        self._rejections += 1
        failure = failure_of(manager)
        reason = (
            "another rank or replica group voted no, or too few groups took part"
            if failure is None
            else f"{type(failure).__name__}: {failure}"
        )
        if self._rejections < _MANY:
            return reason
        step = getattr(manager, "current_step", None)
        since = f"since the Manager's step {step()}" if callable(step) else "so far"
        return (
            f"{reason}; nothing has been committed {since}, after {self._rejections} rejections in a row; "
            f"{_USUAL_CAUSES}"
        )


_OUTCOMES: WeakKeyDictionary[Any, Outcome] = WeakKeyDictionary()


def quorum_is_over(manager: Any) -> bool:
    """Whether no quorum is under way any more, and nothing of a peer's state has been taken over by halves.

    An exception, of an alarm say, may leave ``start_quorum()`` while the quorum goes on in the Manager's
    thread, which heals later. Then this rank has a peer's step without its state.

    Args:
        manager: the Manager; a stand-in for one has nothing under way.
    """
    future = getattr(manager, "_quorum_future", None)
    done = not isinstance(future, Future) or future.done()
    # In this order: while it is not done, healing may still begin.
    return done and getattr(manager, "_healing", None) is not True

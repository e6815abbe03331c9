"""
Why synchronizations are rejected, and when to give up.
"""

from __future__ import annotations

from typing import Optional

from torchft.manager import Manager

__all__ = ["NothingCommitted", "Rejections"]

# The death of a group costs its peers one: then they wait for it, or go on without it.
_LIMIT = 4


class NothingCommitted(Exception):
    """Too many synchronizations in a row were rejected; the message says why.

    Args:
        reason: of the last one, if it is known.
    """

    def __init__(self, reason: Optional[str]) -> None:
        why = reason or "another rank of the group could not take part"
        super().__init__(f"{_LIMIT} synchronizations in a row were rejected: {why}")


class Rejections:
    """Counts the rejected synchronizations of a rank.

    Args:
        min_replicas: groups without which nothing is committed.
    """

    def __init__(self, min_replicas: int) -> None:
        self._min_replicas = min_replicas
        self._in_a_row = 0
        # Of the last one, if it was rejected, and if this rank knows it: another rank may have failed.
        self.reason: Optional[str] = None

    def count(self, manager: Manager, committed: bool) -> None:
        """Takes note of a synchronization that has just ended.

        Args:
            manager: of this rank.
            committed: how the vote went.
        """
        self.reason = None
        failure, participants = manager.errored(), manager.num_participants()
        if committed:
            self._in_a_row = 0
        elif participants < self._min_replicas:
            # However often: the groups that are missing may come.
            self._in_a_row = 0
            self.reason = f"{participants} of the {self._min_replicas} groups that are needed took part"
        else:
            self._in_a_row += 1
            if failure is not None:
                error = failure.original_exception
                self.reason = " ".join(str(error).split()) or type(error).__name__

    @property
    def too_many(self) -> bool:
        """Whether it is time to give up."""
        return self._in_a_row >= _LIMIT

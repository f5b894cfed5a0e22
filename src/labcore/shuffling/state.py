"""What every order, stream and loader here shares: an epoch, a place in it, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["Resumable"]

T_co = TypeVar("T_co", covariant=True)


class Resumable(Generic[T_co]):
    """A loop over epochs that knows how many items of the current one it has handed out.

    A `for` loop over it yields the rest of the current epoch and moves on to the next epoch when
    the last item has come; a loop that is left in the middle is continued by the next loop.
    epoch: number of the current epoch, from 0. It advances by itself; `set_epoch` overrides it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._done = 0
        self._loop: object = None

    def _identity(self) -> dict[str, Any]:
        """What must agree between the one that gave a state and the one that takes it."""
        raise NotImplementedError

    def _rest(self, epoch: int, done: int) -> Iterator[tuple[T_co, bool]]:
        """The items of `epoch` after the first `done`, each with whether it is the last."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        # Two loops would share one place, and each would miss the other's items.
        self._loop = loop = object()
        epoch, done = self.epoch, self._done
        for item, last in self._rest(epoch, done):
            if self._loop is not loop:
                raise RuntimeError(
                    f"a {type(self).__name__} must have one loop at a time, got the next item of "
                    "an older loop; make a second object with the same arguments for a second loop"
                )
            done += 1
            self.epoch, self._done = (epoch + 1, 0) if last else (epoch, done)
            yield item
        if not done:  # an epoch without items: stay on it, and a loop over epochs never ends
            self.epoch = epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` (0, 1, ...) from its first item, wherever the current one stood."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}; count up")
        self.epoch, self._done, self._loop = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """The place after the item that came last, in plain numbers and words (fit for JSON)."""
        return {"epoch": self.epoch, "done": self._done, "identity": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to the place of `state`: what comes next is what would have come next there.

        Raises ValueError when the state was made with other arguments: another order would repeat
        some rows and leave out others.
        """
        ours, theirs = self._identity(), state["identity"]
        different = [
            f"{name} ({theirs.get(name)!r} there, {ours.get(name)!r} here)"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise ValueError(
                f"a state belongs to a {type(self).__name__} with the same arguments, got another "
                f"{', '.join(different)}; build it as it was, or begin an epoch with set_epoch"
            )
        self.epoch, self._done, self._loop = state["epoch"], state["done"], None

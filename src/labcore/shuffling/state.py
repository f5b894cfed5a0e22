"""What orders, streams and loaders share: an epoch, a position in it, and their state."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar

__all__ = ["Resumable"]

T_co = TypeVar("T_co", covariant=True)


class Resumable(Generic[T_co]):
    """An iterable over epochs that counts the items of the current epoch that it has yielded.

    A `for` loop over it yields the rest of the current epoch and advances to the next epoch after
    the last item. If a loop stops early, the next loop continues from there.
    epoch: the current epoch, counted from 0. It advances by itself; `set_epoch` overrides it.
    """

    def __init__(self) -> None:
        self.epoch = 0
        self._done = 0
        self._loop: object = None

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal in the object that saved a state and the one loading it."""
        raise NotImplementedError

    def _rest(self, epoch: int, done: int) -> Iterator[tuple[T_co, bool]]:
        """Yield the items of `epoch` after the first `done`, each with whether it is the last."""
        raise NotImplementedError

    def __iter__(self) -> Iterator[T_co]:
        # Two loops would share one position, and each would miss the other's items.
        self._loop = loop = object()
        epoch, done = self.epoch, self._done
        for item, last in self._rest(epoch, done):
            if self._loop is not loop:
                raise RuntimeError(
                    f"a {type(self).__name__} allows one loop at a time, but an older loop asked "
                    "for an item; make a second object with the same arguments for a second loop"
                )
            done += 1
            self.epoch, self._done = (epoch + 1, 0) if last else (epoch, done)
            yield item
        if not done:  # advance past an epoch without items, or a loop over epochs never ends
            self.epoch = epoch + 1

    def set_epoch(self, epoch: int) -> None:
        """Start `epoch` (0, 1, ...) from its first item, whatever the current position."""
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 0:
            raise ValueError(f"epoch must be a whole number of at least 0, got {epoch!r}")
        self.epoch, self._done, self._loop = epoch, 0, None

    def state_dict(self) -> dict[str, Any]:
        """Return the position after the latest item, as plain numbers and text (fit for JSON)."""
        return {"epoch": self.epoch, "done": self._done, "identity": self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from the position in `state`, with the item that would have come next.

        Raises ValueError if the state was made with other arguments, because another order would
        repeat some rows and skip others.
        """
        ours, theirs = self._identity(), state["identity"]
        different = [
            f"{name} ({theirs.get(name)!r} there, {ours.get(name)!r} here)"
            for name in sorted({*ours, *theirs})
            if ours.get(name) != theirs.get(name)
        ]
        if different:
            raise ValueError(
                f"a state needs a {type(self).__name__} with the same arguments, got a different "
                f"{', '.join(different)}; build it as before, or start an epoch with set_epoch"
            )
        self.epoch, self._done, self._loop = state["epoch"], state["done"], None

"""What any failed run shows, ours or not: the rules that ask for no more hold for both."""

from collections.abc import Collection
from typing import Protocol

from reference.step import Expected
from validation.judging.verdict import Verdict
from validation.observers.observed import Observed
from validation.observers.recording import Recording


class Facts(Protocol):
    """A failed verdict with the run that it is about.

    ``number`` is the operation that disagrees, ``operation`` its name, ``expected`` what it must give. ``unseen`` are
    the stages of which nobody knows what they did.
    """

    @property
    def verdict(self) -> Verdict: ...

    @property
    def observed(self) -> Observed: ...

    @property
    def number(self) -> int: ...

    @property
    def operation(self) -> str: ...

    @property
    def expected(self) -> Expected: ...

    @property
    def recording(self) -> Recording | None: ...

    @property
    def stages(self) -> int: ...

    @property
    def microbatches(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    @property
    def unseen(self) -> Collection[int]: ...

    def differs(self, law: str) -> bool: ...

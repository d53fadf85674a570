"""Headings for a ledger, where the ranks of stages are known."""

from collections.abc import Sequence

from pipeproof.core.ledger import NOWHERE, Heading
from pipeproof.reference.step import Site


class Headings:
    """Makes headings for a ledger; ``placement`` has the rank of every stage."""

    def __init__(self, placement: Sequence[int]) -> None:
        self._placement = tuple(placement)

    def stage(self, law: str, number: int, scenarios: frozenset[str], stage: int, **where: object) -> Heading:
        """At ``stage``, which may be nowhere, on its rank."""
        if stage == NOWHERE:
            return Heading.at(law, number, scenarios, **where)
        return Heading.at(law, number, scenarios, **{"rank": self._placement[stage], **where}, stage=stage)

    def site(self, law: str, number: int, scenarios: frozenset[str], site: Site) -> Heading:
        """At a parameter."""
        return self.stage(law, number, scenarios, site[0], parameter=site[1])

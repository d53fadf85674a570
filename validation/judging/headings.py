"""Where a comparison stands: its law, and rank, stage and parameter as far as they are known."""

from collections.abc import Sequence

from reference.step import Site
from validation.judging.ledger import Heading

NOWHERE = -1  # the stage of a parameter that no stage holds


class Placing:
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

"""Copies of a rank's weights in a wider type, which its optimizer moves, and which are then copied back."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from pipeproof.core.cause import Cause
from pipeproof.core.ledger import Heading, Ledger
from pipeproof.core.tolerance import same_bits
from pipeproof.observers.shards import held_here
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages

_AS_ITS_COPY = "its master copy, in its own type"


@dataclass
class MasterWeights:
    """The copies that are ``held``, by the model's names, beside the weights that ``own`` has.

    A weight is its copy in its own type: when the step begins, and when it has ended.
    """

    own: RankStages
    held: Mapping[str, Tensor]
    _begun: list[str] = field(default_factory=list, init=False)  # weights that were another when the step began
    _before: dict[str, Tensor] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._before = {name: held_here(self.own.parameters[name]).detach().clone() for name in self.held}
        self._begun = [name for name in self.held if not self._is_copied(name)]

    def enter(self, ledger: Ledger, *, rank: int) -> None:
        """Enter whether every weight is its copy."""
        for name in self.held:
            place = {"parameter": name, "rank": rank, "stage": self.own.places[name]}
            at = Heading.at("updated-parameters", 0, frozenset(), **place)
            if name in self._begun:
                ledger.hold(at, False, "another when the step began", _AS_ITS_COPY)
            else:
                ledger.hold(at, self._is_copied(name), "another after the step", _AS_ITS_COPY)

    def causes(self, *, rank: int) -> list[Cause]:
        """What is wrong with the weights of each stage that are not their copies."""
        found: dict[int, list[str]] = {}
        for name in self.held:
            if name in self._begun or not self._is_copied(name):
                found.setdefault(self.own.places[name], []).append(name)
        return [
            Cause(
                "master-weights",
                rank=rank,
                stage=stage,
                parameter=names[0] if len(names) == 1 else None,
                detail=self._told(names),
            )
            for stage, names in found.items()
        ]

    def _told(self, names: Sequence[str]) -> str:
        """What happened to these, where that is one thing."""
        early = [name for name in names if name in self._begun]
        still = all(same_bits(held_here(self.own.parameters[name]).detach(), self._before[name]) for name in names)
        if len(early) == len(names):
            told = "as the step began, not the master copy in its own type"
        elif still and not early:
            told = "as before the step, while the master copy moved"
        else:
            told = "after the step, not the master copy in its own type"
        return f"{first_few(names)}: {told}" if len(names) > 1 else told

    def _is_copied(self, name: str) -> bool:
        weight, master = held_here(self.own.parameters[name]).detach(), held_here(self.held[name]).detach()
        return same_bits(master.to(weight.dtype), weight)

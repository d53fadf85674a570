"""From a random case that shows a planted fault down to the smallest: it must be the one that the specimen states."""

from dataclasses import dataclass, replace

from hypothesis import strategies as st

from pipeproof.core.verdict import LawResult, Verdict
from pipeproof.own.case import MODELS, Case, plainest_first
from pipeproof.own.faults import pass_on
from pipeproof.own.fuzz import Tally, cases, fuzz, judge_case
from pipeproof.pipeline.program import lower
from pipeproof.wings.specimens.families.order import broken_laws
from pipeproof.wings.specimens.specimen import Specimen, occurs_in
from pipeproof.worlds.timeout import BUDGET
from pipeproof.worlds.world import World


@dataclass(frozen=True)
class Shrunk:
    """Where shrinking began and ended, without the specimen, after how many cases; empty if nothing failed."""

    specimen: str
    stated: str
    began: str
    ended: str
    cases: int

    @property
    def as_stated(self) -> bool:
        """True if the smallest case equals the stated one. Equally small schedules are interchangeable."""
        return self.ended.partition(" ")[2] == self.stated.partition(" ")[2] != ""

    def __str__(self) -> str:
        if self.as_stated:
            return f"{self.specimen:<28} as stated after {self.cases:>3} cases, from {self.began}"
        return f"{self.specimen:<28} NOT as stated: {self.ended or 'nothing failed'}, stated {self.stated}"


def shrink(specimen: Specimen, world: World, *, seed: int = 0, max_ranks: int = 4) -> Shrunk:
    """Draw cases that can show ``specimen`` until its law fails, then shrink."""
    began: list[Case] = []

    def run(case: Case, world: World) -> Verdict:
        if specimen.reorder is pass_on:
            verdict = judge_case(case, world)  # raises hangs and crashes
        else:
            broken = broken_laws(specimen.reorder(lower(case.built)))
            verdict = Verdict(str(case), "pass", "none", tuple(LawResult(law, "fail") for law in broken))
        failed = specimen.law in [law.name for law in verdict.laws if law.outcome == "fail"]
        if not failed or (not began and str(case) in simplest):  # begin with a case that chance has made
            return replace(verdict, outcome="pass")
        began.append(case)
        return replace(verdict, outcome="fail")

    def note(drawn: tuple[Case, int]) -> Case:
        case, number = drawn
        if number == 0:  # Hypothesis draws the simplest before random ones
            simplest.add(str(case))
        return case

    simplest: set[str] = set()
    drawn = st.tuples(cases_that_show(specimen, max_ranks=max_ranks), st.integers(0, 2**16))
    tally = Tally(BUDGET)
    found = fuzz(world, tally, seed_=seed, strategy=drawn.map(note), run=run)
    ended = "" if found is None else _plain(found.case)
    start = _plain(began[0]) if began else ended
    return Shrunk(specimen.name, specimen.smallest, start, ended, tally.cases)


def cases_that_show(specimen: Specimen, *, max_ranks: int = 4) -> st.SearchStrategy[Case]:
    """Draw random cases that meet all needs of ``specimen``, with it planted."""
    needs = specimen.needs
    models = plainest_first(needs.models or MODELS)  # to shrink to the first

    def plant(case: Case) -> Case:
        return replace(
            case,
            loss=needs.loss or case.loss,
            ragged=needs.ragged or case.ragged,
            unequal=needs.unequal or case.unequal,
            plan=case.plan if occurs_in(needs.plan, case.plan) else needs.plan,
            specimen=specimen.name,
        )

    wide = cases(models=models, max_ranks=max_ranks).map(plant)
    return wide.filter(lambda case: not specimen.missing(case))


def _plain(case: Case) -> str:
    return str(replace(case, specimen=""))

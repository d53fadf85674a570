"""What is judged: the laws for it, who must hold which parameter, and who knows the right answers."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from reference.model import build_model
from reference.step import Recipe, Reference, Site
from validation.cases.case import Case
from validation.cases.observe import data_for, max_norm_of
from validation.cases.stages import copies_apart, owners
from validation.judging.oracle import LiveOracle, Oracle


@dataclass(frozen=True)
class Subject:
    """What is known before anything is compared.

    ``config`` names the subject, ``bindings`` says its numbers in words; ``plan`` are its operations. ``due`` are the
    sites that must be held, and ``tied`` the
    parameters with copies in several of them: for each, the name of its copy by stage. ``strangers`` are held and not
    known to the reference. ``skipped`` are laws that do not apply, with the reason, and ``remarks`` what readers of
    others should know. ``unseen`` stages are those whose
    actions nobody noted, ``uncalled`` those whose modules nobody watched. Where ``every_rank`` is False, ranks may
    leave it to others to report losses and norm.
    """

    config: str
    laws: tuple[str, ...]
    plan: tuple[str, ...]
    microbatches: int
    due: frozenset[Site]
    oracle: Oracle
    tied: Sequence[Mapping[int, str]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    strangers: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    every_rank: bool = True
    bindings: str = ""


def subject_of(case: Case, laws: tuple[str, ...]) -> Subject:
    """``case`` as a subject: its reference, and what its plan leaves out."""
    device = "cpu" if case.device == "cpu" else "cuda:0"
    model = build_model(case.model, layers=case.layers, seed=case.seed, dtype=case.dtype).to(device)
    owner = owners(model, case.split)
    tied = copies_apart(model, owner)
    oracle = LiveOracle(
        Reference(model, owner=owner, recipe=Recipe(loss=case.loss, late=case.late)),
        plan=case.plan,
        batches=lambda number: [batch.to(device) for batch in data_for(case, number)],
        max_norm=lambda number: max_norm_of(case, number),
    )
    due = frozenset((stage, name) for name, stage in owner.items())
    laws = (*laws, "replicas") if case.replicas > 1 else laws
    microbatches = case.microbatches * case.replicas
    return Subject(str(case), laws, case.plan, microbatches, due, oracle, tied, bindings=case.bindings)

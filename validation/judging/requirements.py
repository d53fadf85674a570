"""What is judged: the laws for it, who must hold which parameter, and who knows the right answers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from reference.step import Site
from validation.judging.oracle import Oracle


@dataclass(frozen=True)
class Subject:
    """What is known before anything is compared.

    ``config`` names the subject, ``bindings`` says its numbers in words; ``plan`` are its operations. ``due`` are the
    sites that must be held, and ``tied`` the parameters with copies in several of them: for each, the name of its copy
    by stage. ``strangers`` are held and not known to the reference. ``skipped`` are laws that do not apply, with the
    reason, and ``remarks`` what readers of others should know. ``unseen`` stages are those whose actions nobody noted,
    ``uncalled`` those whose modules nobody watched, ``frozen`` those that owe no backward, ``traced`` those whose
    actions the step itself tells. Where ``every_rank`` is False, ranks may leave it to others to report losses and
    norm. ``by_numbers``: how often and in which mode a stage ran decides only where its gradients are wrong;
    ``mode_matters``: whether a mode changes any.
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
    frozen: Collection[int] = ()
    traced: Collection[int] = ()
    every_rank: bool = True
    by_numbers: bool = False
    mode_matters: Callable[[], bool] = lambda: True
    bindings: str = ""

"""What is known of a run before anything of it is compared."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.core.oracle import Oracle
from pipeproof.reference.step import Site


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What must hold of actions and parameters.

    ``plan`` are the operations, and ``counts`` how many microbatches each has. ``due`` are the sites that must be held;
    ``unmatched`` are held and not known to the reference. ``unseen`` stages are those whose actions nobody noted,
    ``uncalled`` those whose modules nobody watched, ``frozen`` those that owe no backward, ``traced`` those whose
    actions the step itself tells. ``weightless``: the microbatches whose losses train nothing, and that owe none.
    ``mode_matters``: whether a mode changes any result.
    """

    counts: tuple[int, ...]
    plan: tuple[str, ...] = ("train",)
    due: frozenset[Site] = frozenset()
    unmatched: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    frozen: Collection[int] = ()
    traced: Collection[int] = ()
    weightless: Collection[int] = ()
    mode_matters: Callable[[], bool] = lambda: True


@dataclass(frozen=True, kw_only=True)
class Requirements(Conditions):
    """What is known of a run before anything is compared.

    ``config`` names it, ``bindings`` says its numbers in words. ``tied``: parameters with copies in several stages, for
    each the name of its copy by stage. ``skipped`` are laws that do not apply, with the reason, ``missed`` those of
    whose matter nothing was seen, and ``remarks`` what readers of others should know. Where ``every_rank`` is False,
    ranks may leave it to others to report losses and norm. ``results_decide``: calls, boundaries and starting weights
    decide nothing where every result is right.
    """

    config: str
    laws: tuple[str, ...]
    oracle: Oracle
    tied: Sequence[Mapping[int, str]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    every_rank: bool = True
    results_decide: bool = False
    bindings: str = ""

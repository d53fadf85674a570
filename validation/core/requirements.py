"""What is known of a run before anything of it is compared."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from pipeproof.core.oracle import Oracle
from pipeproof.reference.step import Site


@dataclass(frozen=True)
class Requirements:
    """What is known before anything is compared.

    ``config`` names it, ``bindings`` says its numbers in words; ``plan`` are its operations, and ``counts``
    how many microbatches each has. ``due`` are the
    sites that must be held, and ``tied`` the parameters with copies in several of them: for each, the name of its copy
    by stage. ``unmatched`` are held and not known to the reference. ``skipped`` are laws that do not apply, with the
    reason, ``missed`` those of whose matter nothing was seen, and ``remarks`` what readers of others should know.
    ``unseen`` stages are those whose actions nobody noted, ``uncalled`` those whose modules nobody watched, ``frozen``
    those that owe no backward, ``traced`` those whose actions the step itself tells. Where ``every_rank`` is False,
    ranks may leave it to others to report losses and norm. ``results_decide``: calls, boundaries and starting weights
    decide nothing where every result is right; ``mode_matters``: whether a mode changes any. ``ahead``: steps that make
    what of the right answers can be made before anything is seen.
    """

    config: str
    laws: tuple[str, ...]
    plan: tuple[str, ...]
    counts: tuple[int, ...]
    due: frozenset[Site]
    oracle: Oracle
    tied: Sequence[Mapping[int, str]] = ()
    skipped: Mapping[str, str] = field(default_factory=dict)
    missed: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    unmatched: Mapping[Site, str] = field(default_factory=dict)
    unseen: Collection[int] = ()
    uncalled: Collection[int] = ()
    frozen: Collection[int] = ()
    traced: Collection[int] = ()
    every_rank: bool = True
    results_decide: bool = False
    mode_matters: Callable[[], bool] = lambda: True
    bindings: str = ""
    ahead: Iterable[object] = ()

"""A rank's memory between checks: the last bitwise step, and tensors with gradient sums."""

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from weakref import ReferenceType, ref

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from pipeproof.core.ledger import COMPUTED
from pipeproof.core.observe.per_rank_globals import belongs_to_rank
from pipeproof.core.verdict import Verdict
from pipeproof.records.step_record import Pairs

Forms = tuple[tuple[int, ...], ...]  # the shapes of the tensors of all microbatches


@dataclass(frozen=True)
class LastCheck:
    """``exact``: laws compared in the last bitwise step; ``forms``: shapes in its microbatches.

    ``weights``: its initial weights, on the rank with the reference. ``sums``: tensors in which the last step handed
    over its gradients, by name, while the job keeps them.
    """

    exact: frozenset[str] = frozenset()
    forms: Forms | None = None
    weights: Mapping[str, Tensor] = field(default_factory=dict)
    sums: Mapping[str, ReferenceType[Tensor]] = field(default_factory=dict)

    def bitwise_laws(self, given: Pairs | None) -> frozenset[str]:
        """Laws that stay bitwise for equal shapes, and so equal kernels."""
        return self.exact if self.forms == forms_of(given) else frozenset()

    @property
    def added_to(self) -> dict[str, Tensor]:
        """Current content in the tensors with handed over gradients."""
        return {name: one for name, there in self.sums.items() if (one := there()) is not None}


_checks: MutableMapping[nn.Parameter, LastCheck] = WeakIdKeyDictionary()  # by the first parameter of a rank's stages
belongs_to_rank(__name__, "_checks", fresh=lambda _: WeakIdKeyDictionary())


def forms_of(given: Pairs | None) -> Forms | None:
    """Return all tensor shapes in the microbatches; None on a rank without them."""
    every = None if given is None else (one for one in tree_leaves(list(given)) if isinstance(one, Tensor))
    return None if every is None else tuple(tuple(one.shape) for one in every)


def last_check(modules: Mapping[int, nn.Module]) -> LastCheck:
    """Return the memory for a rank's stages."""
    return _checks.get(key, LastCheck()) if (key := _key(modules)) is not None else LastCheck()


def remember(
    modules: Mapping[int, nn.Module],
    verdict: Verdict,
    given: Pairs | None,
    *,
    sums: Mapping[str, object],
    weights: Callable[[], Mapping[str, Tensor]],
) -> None:
    """Remember a check: ``sums`` always, ``weights`` only after a bitwise step."""
    if (key := _key(modules)) is None:
        return
    last = last_check(modules)
    there = {name: ref(one) for name, one in sums.items() if isinstance(one, Tensor)}
    computed = [one for one in verdict.laws if one.name in COMPUTED and one.checked]
    if verdict.outcome != "pass" or any(one.exact < one.checked for one in computed):
        _checks[key] = LastCheck(last.exact, last.forms, last.weights, there)
        return
    exact = frozenset(one.name for one in computed)
    _checks[key] = LastCheck(exact, forms_of(given), weights(), there)


def _key(modules: Mapping[int, nn.Module]) -> nn.Parameter | None:
    return next((one for module in modules.values() for one in module.parameters()), None)

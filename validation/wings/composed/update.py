"""A step's update of a rank's weights, compared with the update by a copy of its optimizer."""

from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer
from torch.utils._pytree import tree_leaves

from pipeproof.core.cause import Cause
from pipeproof.core.comparison import Allowed, Comparison, ExpectedOperation
from pipeproof.core.ledger import Ledger
from pipeproof.core.limits import precision_among
from pipeproof.core.observe.digest import digest
from pipeproof.core.observe.shards import add_partial, local_tensor
from pipeproof.core.reason import Reason
from pipeproof.core.tolerance import default_floor, same_bits
from pipeproof.core.verdict import Mismatch, describe_error
from pipeproof.pipeline.sizes import first_few
from pipeproof.records.rank_part import RankStages
from pipeproof.records.record import RecordError
from pipeproof.reference.copied import deep_copy

LAW = "updated-parameters"
_MASTER = "its master copy, in its own type"
_OTHER_UPDATE = (
    0.02  # the least fault of an update whose gradient is right, relative to it: half of it must be observed
)
_BY_ELEMENT = (  # optimizers that treat elements independently
    optim.ASGD,
    optim.Adadelta,
    optim.Adagrad,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Rprop,
    optim.SGD,
)


Weights = Mapping[str, Tensor]  # by the model's names; of shards, the local part


class WeightsAfter:
    """Compare the weights of ``own`` after the step with the update by copies of its optimizers.

    ``masters``: the optimizers' wider copies of weights, by weight. Optimizers move these, and each weight must equal
    its rounded copy, before the step and after it. ``foreseen``: a prediction was requested. ``causes``: why weights
    differ from their copies.
    """

    def __init__(self, own: RankStages, ledger: Ledger, masters: Mapping[nn.Parameter, Tensor] | None = None) -> None:
        self.foreseen = False
        self.causes: list[Cause] = []
        self._own, self._ledger = own, ledger
        self._update: tuple[Weights, Weights] | None = None  # before the optimizer's step, and after it
        copies = {id(weight): copy for weight, copy in (masters or {}).items()}
        self._masters = {name: copies[id(one)] for name, one in own.parameters.items() if id(one) in copies}
        self._before = {name: own.parameters[name].detach().clone() for name in self._masters}
        self._unlike = {name for name in self._masters if not self._is_copied(name)}  # when the step begins

    def foresee(
        self,
        optimizers: Sequence[Optimizer],
        parameters: Mapping[str, Tensor],
        gradients: Mapping[str, Any],
        *,
        factor: float | None,
    ) -> None:
        """Predict the update of ``parameters`` by ``optimizers``, both by the model's names.

        Gradients are multiplied by ``factor`` first; None: the step is skipped. Masters get theirs from ``gradients``.
        """
        held = {name: self._masters.get(name, one) for name, one in parameters.items()}
        given = {name: one for name, one in gradients.items() if name in self._masters}
        kinds = " and ".join(dict.fromkeys(type(one).__name__ for one in optimizers))
        try:
            self._update = expect_update(optimizers, held, given, factor)
            self.foreseen = True
        except RecordError as error:
            self.give_up(f"what {kinds} makes of gradients is not known: {error}")
        except Exception as error:  # all types: user code
            self.give_up(f"a copy of {kinds} cannot take its step: it raised {describe_error(error)}")

    def give_up(self, why: str) -> None:
        """Record ``why`` the update is unknown."""
        self._ledger.doubt(LAW, why, Reason.OPTIMIZER)
        self.foreseen = True

    def enter(self, begun: Mapping[int, Mapping[str, bytes]], *, rank: int) -> None:
        """Enter the result of the comparison. ``begun``: digests of the initial weights, by stage and name."""
        if not self.foreseen:
            return
        if self._update is not None:
            before, after = self._update
            expected = ExpectedOperation("train", (), (), before=before, parameters=after)
            floor = replace(default_floor(precision_among(before.values())), fault=_OTHER_UPDATE)
            at = Comparison(expected, Allowed(floor=floor), self._ledger)
            for name, one in self._own.parameters.items():
                if name in after:
                    at.parameter(name, self._masters.get(name, one), rank=rank, stage=self._own.places[name])
            trained, moved = list[str](), list[str]()
            for stage, digests in begun.items():
                for name, one in self._own.modules[stage].named_parameters(remove_duplicate=False):
                    if (full := self._own.rename(stage, name)) not in after:
                        if one.requires_grad:
                            trained.append(full)
                        elif digest(local_tensor(one)) != digests[name]:
                            moved.append(full)
            self._ledger.leave_out(LAW, trained, "optimizer= does not hold them", Reason.OPTIMIZER)
            self._ledger.leave_out(LAW, moved, "they moved, and optimizer= does not hold them", Reason.OPTIMIZER)
        self._enter_masters(rank)

    def _enter_masters(self, rank: int) -> None:
        wrong: dict[int, list[str]] = {}
        for name in self._masters:
            stage = self._own.places[name]
            at = Mismatch(LAW, 1, parameter=name, rank=rank, stage=stage)
            when = "when the step began" if name in self._unlike else "after the step"
            holds = name not in self._unlike and self._is_copied(name)
            self._ledger.hold(at, holds, f"another {when}", _MASTER)
            if not holds:
                wrong.setdefault(stage, []).append(name)
        for stage, names in wrong.items():
            change = "after the step, not the master copy in its own type"
            if self._unlike.issuperset(names):
                change = "as the step began, not the master copy in its own type"
            elif self._unlike.isdisjoint(names) and all(
                same_bits(self._own.parameters[name].detach(), self._before[name]) for name in names
            ):
                change = "as before the step, while the master copy moved"
            single = names[0] if len(names) == 1 else None
            detail = change if single else f"{first_few(names)}: {change}"
            self.causes.append(Cause("update", rank=rank, stage=stage, parameter=single, detail=detail))

    def _is_copied(self, name: str) -> bool:
        weight = self._own.parameters[name].detach()
        return same_bits(local_tensor(self._masters[name]).detach().to(weight.dtype), weight)


def expect_update(
    optimizers: Sequence[Optimizer],
    parameters: Mapping[str, Tensor],
    given: Mapping[str, Any],
    factor: float | None,
) -> tuple[Weights, Weights]:
    """Predict the update of ``parameters`` by copies of ``optimizers``, before they step.

    ``given``: gradients outside ``.grad``, by name. It needs memory for another copy of weights and states. Raises
    ``RecordError`` if a copy behaves differently from its optimizer.
    """
    parts = list(_parts_of(optimizers))
    own = {id(one) for part in parts for group in part.param_groups for one in group["params"]}
    some = {name: one for name, one in parameters.items() if id(one) in own}
    before = {name: local_tensor(one).detach().clone() for name, one in some.items()}
    if factor is None:
        return before, before
    copies, twins = _twins(some, parts)
    for name, copy in copies.items():
        gradient = given[name] if name in given else some[name].grad
        here = None if gradient is None else local_tensor(add_partial(gradient, some[name])).detach()
        copy.grad = None if here is None else here.to(copy.dtype) * factor
    with torch.enable_grad():
        for one in optimizers:  # these step the inner ones
            twins[id(one)].step()
    moved = [name for name, one in some.items() if not same_bits(local_tensor(one).detach(), before[name])]
    with torch.no_grad():
        for name in moved:
            local_tensor(some[name]).copy_(before[name])
    if moved:
        raise RecordError("its copy moved the weights themselves, which are put back")
    return before, {name: copy.detach() for name, copy in copies.items()}


def _parts_of(optimizers: Sequence[Optimizer]) -> Iterator[Optimizer]:
    """Yield ``optimizers``, each with those among its attributes.

    Raises ``RecordError`` unless a copy steps like each: by its class's step, on local data.
    """
    every = [torch_optimizer._global_optimizer_pre_hooks, torch_optimizer._global_optimizer_post_hooks]
    for optimizer in optimizers:
        found = [optimizer]
        for one in found:
            own, kind = vars(one), type(one)
            inner = [leaf for leaf in tree_leaves([*own.values()]) if isinstance(leaf, Optimizer)]
            found += [leaf for leaf in inner if all(leaf is not other for other in found)]
            step = own.get("step")  # a learning rate schedule's replacement only counts calls
            counts = getattr(step, "_wrapped_by_lr_sched", False) and getattr(step, "__wrapped__", None) is kind.step
            hooks = [own.get("_optimizer_step_pre_hooks"), own.get("_optimizer_step_post_hooks"), *every]
            if any(hooks) or not (step is None or counts):
                raise RecordError("its step has hooks, or was replaced by another function")
            weights = (weight for group in one.param_groups for weight in group["params"])
            if kind not in _BY_ELEMENT and any(local_tensor(weight) is not weight for weight in weights):
                raise RecordError("it has shards, and may look at whole weights")
        yield from found


def _twins(
    parameters: Mapping[str, Tensor], parts: Sequence[Optimizer]
) -> tuple[dict[str, nn.Parameter], dict[int, Optimizer]]:
    """Copy ``parameters`` by name, and ``parts`` by id with all attributes but hooks, because torch's copies lose some.

    Shards are replaced by their local parts.
    """
    blank = {id(one): type(one).__new__(type(one)) for one in parts}
    instead: dict[int, object] = {**blank}
    # A hook may hold the whole job, and a step that was put in place is the original's.
    attributes = [
        {
            name: OrderedDict() if name.endswith("_hooks") else value
            for name, value in vars(one).items()
            if name != "step"
        }
        for one in parts
    ]
    given: Any = dict(parameters), attributes
    for one in tree_leaves(given):
        if isinstance(one, Tensor) and (here := local_tensor(one)) is not one:
            here = here.detach().clone()
            instead[id(one)] = nn.Parameter(here, one.requires_grad) if isinstance(one, nn.Parameter) else here
    copies, attributes = deep_copy(given, instead=instead)
    for part, own in zip(parts, attributes, strict=True):
        blank[id(part)].__dict__.update(own)
    return copies, blank

"""A rank's own links of the chain: its stages run once more, each call as it was, and what that gives."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.floors import Floors
from pipeproof.core.limits import precision_of
from pipeproof.core.updates import Pending
from pipeproof.core.verdict import raised
from pipeproof.foreign.crossings import near
from pipeproof.observers.calls import Call, Flows
from pipeproof.observers.elements import is_rounded, version
from pipeproof.observers.own_losses import leaves_of
from pipeproof.observers.recording import HANDED_ON, MADE, RECEIVED
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.again import Again, Called, State, flowed, repeats
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.drawn_from import KeptElsewhere
from pipeproof.reference.model import LossFn
from pipeproof.reference.otherwise import widened
from pipeproof.reference.step import Contribution, Expected, Gradient, Loss, LossError, Recipe, Reference, Site
from pipeproof.wings.composed.first_run import FirstRun
from pipeproof.wings.composed.links import Ending, Link, Made, Point, comes_again, fits, limits_of, seen_at
from pipeproof.wings.composed.obstacles import by_attributes, draws_elsewhere
from pipeproof.wings.composed.run_once_more import RunOnceMore
from pipeproof.worlds.drawing import draw_some


class OwnStage:
    """A stage of this rank, as its ``calls`` used it: a model of its own, with the weights that it has now.

    ``ending``: what comes after it, if it is the last one; else what flowed back to it is where its backwards begin.
    ``in_parts``: it is cut inside among ranks, so that it rounds otherwise where it is put together.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        calls: Sequence[Call],
        *,
        ending: Ending | None,
        accumulation: Accumulation,
        in_parts: bool = False,
    ) -> None:
        self.in_parts = in_parts
        self.stage, self._calls, self._ending = stage, list(calls), ending
        self._model = Again(module)
        loss: LossFn = self._flow if ending is None else self._ending_loss
        recipe = Recipe(Loss(loss, 1.0 if ending is None else ending.divisor), accumulation=accumulation)
        names = [name for name, _ in self._model.named_parameters(remove_duplicate=False)]
        self._reference = Reference(self._model, owner=dict.fromkeys(names, stage), recipe=recipe)
        self._loss_is_cast = any(self._kept(k).state.casts for k in range(len(self._calls)))  # until that is seen not
        self._cast_is_known = self._draws_others = False
        self._loss_type: torch.dtype | None = None
        self._loss_writes = True  # to what it is given, until one does not
        self.loss_leaves: list[Tensor] | None = None  # what the loss is of besides what the stage gives
        self._noted, self._more = dict[Point, Tensor](), dict[int, Tensor]()
        self.first_run = FirstRun()
        self.links: list[Link] = []
        self.other_form = ""  # why it is not known what it gives, where its outputs have other shapes again
        self._sums: dict[tuple[int, str], Gradient] = {}

    def run(self) -> None:
        """Run each call once more, in the order in which gradients were added up."""
        found: dict[int, Link] = {}
        for k in self._order:
            onto = self._sums if self._calls[k].ran and self._in_place else {}
            try:
                made = self._find_cast(k) or self._again(self._reference, self._batches[k], onto=onto)
            except Exception as error:  # no one type: it is the user's code that runs, on what may be wrong
                self._note_form(k, self._noted)
                found[k] = Link({}, obstacle=self.other_form or self._told_of(error))
                continue
            self._note_form(k, made.tensors)
            if self.other_form:
                found[k] = Link({}, obstacle=self.other_form)
                continue
            found[k] = self._link(k, made)
            if made.contribution is not None and self._calls[k].ran:
                self._add(made.contribution)
        self.links = [found[k] for k in range(len(self._calls))]
        for batch in self.batches[:1]:
            self.first_run.find_out(partial(self._reference.contribution, batch, self.loss.function, self.loss.divisor))

    def _told_of(self, error: Exception) -> str:
        stage = f"stage {self.stage}"
        return (
            draws_elsewhere(stage) if isinstance(error, KeptElsewhere) else f"run again, {stage} raised {raised(error)}"
        )

    @property
    def _in_place(self) -> bool:
        """Whether gradients are added up as autograd adds them: then no microbatch's are there beside the sum."""
        return self._reference.recipe.accumulation == PLAIN

    def _add(self, contribution: Contribution) -> None:
        if self._in_place:
            self._sums |= {site: one for site, one in contribution.gradients.items() if one is not None}
        else:
            self._sums = self._reference.accumulate([contribution], orders={self.stage: [0]}, onto=self._sums)

    @property
    def gradients(self) -> dict[str, Gradient]:
        """What the step must have added up in each parameter, by its name in the stage."""
        every = self._model.named_parameters(remove_duplicate=False)
        return {name: self._sums.get((self.stage, name)) for name, _ in every}

    @property
    def closed(self) -> bool:
        """Whether what its calls give is known."""
        return all(link.closed for link in self.links)

    @cached_property
    def narrowest(self) -> torch.dtype | None:
        """The narrowest type in which it computes."""
        casts = [kind for k in range(len(self._calls)) for on, kind in self._kept(k).state.autocast.values() if on]
        types = [*casts, *(one.dtype for one in self._model.parameters() if is_rounded(one.dtype))]
        return max(types, key=lambda one: precision_of(one).unit, default=None)

    @property
    def inside(self) -> torch.dtype | None:
        """That of a stage in parts: sums over ranks are rounded there."""
        return self.narrowest if self.in_parts else None

    @property
    def drew(self) -> bool:
        """Whether a call drew random numbers when it was run again."""
        return bool(self._model.__dict__["drew"])

    def doubt(self, why: str) -> None:
        """It is not known what its calls give."""
        self.links = [Link({}, obstacle=why) for _ in self.links]

    def wrong(self) -> Iterator[tuple[int, Point, Call]]:
        """Where calls give something else again than they gave, by more than rounding."""
        for k, link in enumerate(self.links):
            for at, due in link.gives.items():
                seen = seen_at(self._calls[k], at)
                if at not in link.strange and seen is not None and seen.distance(due) > link.allowed.get(at, 0.0):
                    yield k, at, self._calls[k]

    @property
    def speaks(self) -> bool:
        """Whether its calls speak to other ranks: it is run no more than they run it."""
        return bool(self.first_run.speaks)

    @property
    def flowing(self) -> int:
        """How many gradients of its outputs are not zero when it is run again."""
        return len(self._flows)

    @property
    def fitting(self) -> int:
        """How many of them are what they were, but for rounding."""
        return sum(seen is not None and fits(seen, due) for seen, due in self._flows)

    @property
    def factor(self) -> float | None:
        """What everything that flowed to its outputs is, in multiples of what it is when run again: None if various."""
        found = [None if seen is None else seen.factor(due) for seen, due in self._flows]
        first = found[0] if found else None
        return first if first is not None and all(near(one, first) for one in found) else None

    @property
    def _flows(self) -> list[tuple[Sketch | None, Sketch]]:
        every = [(k, at, one) for k, link in enumerate(self.links) for at, one in link.gives.items()]
        return [(seen_at(self._calls[k], at), one) for k, at, one in every if at[0] == RECEIVED and one.norm]

    @property
    def unreached(self) -> list[str]:
        """The parameters to be trained to which no call contributes, where any should."""
        wanting = [name for name, one in self._model.named_parameters() if one.requires_grad and self.links]
        return [name for name in wanting if self._sums.get((self.stage, name)) is None]

    @property
    def other(self) -> bool:
        """Whether anything that its calls give is not what they gave."""
        return any(link.limits for link in self.links)

    @property
    def single_names(self) -> list[str]:
        """The stage's parameters, each by the first of its names."""
        return [name for name, _ in self._model.named_parameters()]

    @cached_property
    def floors(self) -> Floors:
        """What rounding alone may do to these gradients: each call is run several times more."""
        return Floors(self._reference, [Pending(self.expected, self.batches, {self.stage: range(len(self.batches))})])

    @cached_property
    def once_more(self) -> RunOnceMore:
        """What these gradients are in another run."""
        made = (self._reference.contribution(one, self.loss.function, self.loss.divisor) for one in self.batches)
        orders = {self.stage: [0]}
        return RunOnceMore.of(made, lambda one, onto: self._reference.accumulate([one], orders=orders, onto=onto))

    @cached_property
    def expected(self) -> Expected:
        """The stage's own step, with what each of its calls contributes."""
        contributions = self._reference.contribute(self.batches)
        before = {name: one.detach() for name, one in self._model.named_parameters(remove_duplicate=False)}
        losses = tuple(one.loss for one in contributions)
        orders = {self.stage: range(len(contributions))}
        sums = self._reference.accumulate(contributions, orders=orders) if contributions else dict[Site, Gradient]()
        return Expected("train", losses, sum(losses), contributions, before, gradients=sums)

    @cached_property
    def batches(self) -> list[Batch]:
        """What the calls that contribute were given, in the order of their backwards."""
        return [self._batches[k] for k in self._order if self._calls[k].ran]

    @property
    def model(self) -> nn.Module:
        """The stage as a model of what its calls were given."""
        return self._model

    @property
    def loss(self) -> Loss:
        """The objective of one call."""
        assert isinstance(self._reference.recipe.loss, Loss), "it is one of our own"
        return self._reference.recipe.loss

    @property
    def numbers(self) -> list[int]:
        """The calls that contribute, in the order of their backwards."""
        return [k for k in self._order if self._calls[k].ran]

    @cached_property
    def _order(self) -> list[int]:
        ends = {k: call.ran[0] for k, call in enumerate(self._calls) if call.ran}
        return sorted(range(len(self._calls)), key=lambda k: (k not in ends, ends.get(k, k)))

    @cached_property
    def _batches(self) -> list[Batch]:
        return [self._batch(k) for k in range(len(self._calls))]

    def _kept(self, k: int) -> Called:
        again = self._calls[k].again
        assert again is not None, "the calls of a stage that is checked so are kept"
        return again

    def _batch(self, k: int) -> Batch:
        again = self._kept(k)
        tensors = [one.requires_grad_(n in again.wanting) for n, one in enumerate(again.tensors)]
        target = again.flows if self._ending is None else self._ending.targets[k]
        return Batch((again, *tensors), target, 1)  # type: ignore[arg-type]  # the model takes what it is

    def _flow(self, output: Any, flows: Any) -> Tensor:
        """The objective of an inner stage, which notes what the stage gave."""
        self._noted = {(MADE, n): one for n, one in enumerate(tensors_in(output))}
        found = flowed(output, flows, tensors=tensors_in, note=self._more.__setitem__)
        self.first_run.backward_begins(self._kept(0).state.drawn)
        return found

    def _ending_loss(self, output: Any, target: Any) -> Tensor:
        """The loss, which notes what the last stage gave, and what flows back to that."""
        assert self._ending is not None, "only the last stage has one"
        made = tensors_in(output)
        as_made = [one.detach() for one in made]  # a hook that has the very tensor at which it is keeps both for ever
        noted = self._noted = {(MADE, n): one.clone() if self._loss_writes else one for n, one in enumerate(as_made)}
        versions = [*map(version, made)]
        hooks = self._model.__dict__["stage"]._backward_pre_hooks  # they are given it next, and may write to it
        kept = Tensor.clone if hooks or any(one._backward_hooks for one in made) else Tensor.detach
        for n, one in enumerate(made):
            if one.requires_grad and n not in repeats(made):  # of one tensor, what flows to it is told once
                write = partial(noted.__setitem__, (RECEIVED, n))
                Flows(first=True).made(one, partial(lambda note, flow: partial(note, kept(flow)), write))
        if self._draws_others:
            draw_some()
        state = self._kept(0).state
        with state.cast() if self._loss_is_cast else nullcontext(), self._model.looking(state, "the loss"):
            found = self._ending.loss(output, target)
        self._loss_type, self._loss_writes = found.dtype, versions != list(map(version, made))
        if self.loss_leaves is None:
            self.loss_leaves = leaves_of(found, made)
        self.first_run.backward_begins(state.drawn)
        return found

    def _again(
        self, reference: Reference, batch: Batch, *, onto: Mapping[Site, Gradient] = MappingProxyType({})
    ) -> Made:
        loss, self._noted, self._more = self.loss, {}, {}
        contribution = None
        with self.first_run.noting(), suppress(LossError):
            contribution = reference.contribution(batch, loss.function, loss.divisor, onto=onto)
        tensors = {at: one.detach() for at, one in self._noted.items()}
        for n, one in (contribution.inputs if contribution is not None else {}).items():
            if one is not None:
                tensors[HANDED_ON, n - 1] = one  # the first input is the call itself
        return Made(tensors, self._more, contribution)

    def _link(self, k: int, made: Made) -> Link:
        gives = self._sketched(k, made)
        contribution = made.contribution
        loss = None if self._ending is None or contribution is None else contribution.loss
        own = Link(gives, loss=loss, loss_type=self._loss_type, mode_matters=self._mode_matters(k))
        link = self._received(k, made.more, own)
        if not (other := self._others(k, gives)):
            return link
        if drawn := self._model.drawn_from:
            return Link({}, obstacle=draws_elsewhere(drawn[0] or f"stage {self.stage}", drawn[1]))
        names = self._model.changed_since(self._kept(k)) if any(where == MADE for where, _ in other) else []
        if names and not self.speaks and self._gives(k, self._kept(k).state.with_attributes()):
            return Link({}, obstacle=by_attributes(self.stage, names))
        return self._measured(k, link, made, other)

    def _others(self, k: int, gives: Mapping[Point, Sketch]) -> list[Point]:
        """Where what the call gives again is not as it was to the bit."""
        seen = {at: seen_at(self._calls[k], at) for at in gives}
        return [at for at, one in seen.items() if one is not None and one.digest != gives[at].digest]

    def _note_form(self, k: int, made: Mapping[Point, Tensor]) -> None:
        for (where, number), one in made.items():
            seen = seen_at(self._calls[k], (where, number))
            if where == MADE and seen is not None and seen.shape != tuple(one.shape):
                told = f"gave an output of shape {list(seen.shape)} and, run again, gives {list(one.shape)}"
                self.other_form = f"stage {self.stage} {told}: if ranks pass on parts of it, that is not checked so"

    def _find_cast(self, k: int) -> Made | None:
        """Find out whether the loss was cast as the call was: which way it gives what it gave. What it gives, then."""
        if self._cast_is_known or not self._loss_is_cast:
            return None
        for self._loss_is_cast in (True, False):
            made = self._again(self._reference, self._batches[k])
            if self.speaks or not self._others(k, self._sketched(k, made)):
                self._cast_is_known = True
                return made if not self._sums else None
        self._loss_is_cast = True
        return None

    def _sketched(self, k: int, made: Made) -> dict[Point, Sketch]:
        """What the call gives again; where it is what was seen, that."""
        return {at: sketch(one, known=seen_at(self._calls[k], at)) for at, one in made.tensors.items()}

    def _mode_matters(self, k: int) -> bool:
        """Whether a call that was in evaluation mode would have given something else in training mode."""
        if self._calls[k].training or self.speaks:
            return not self._calls[k].training
        return not self._gives(k, self._kept(k).state.in_training())

    def _gives(self, k: int, state: State) -> bool:
        """Whether a call gives what it gave, in this ``state``."""
        again = self._kept(k)
        try:
            with torch.no_grad():
                made = tensors_in(self._model(replace(again, state=state), *again.tensors))
        except Exception:  # no one type: it is the user's code that runs
            return False
        return [sketch(one).digest for one in made] == [one.digest for one in self._calls[k].outputs]

    def _received(self, k: int, more: Mapping[int, Tensor], link: Link) -> Link:
        """``link``, where ``more`` of some outputs' gradients came from other outputs."""
        received, limits = dict[int, Sketch](), dict[Point, float]()
        for n, one in more.items():
            whole, least = self._kept(k).flows[n].to(one.device), precision_of(one.dtype).least
            rest, size = whole - one, (whole.norm() + one.norm()).item()
            rest = torch.zeros_like(rest) if rest.norm().item() <= least * size else rest  # that is rounding
            received[n] = sketch(rest)
            limits[RECEIVED, n] = least * max(1.0, size / (rest.norm().item() or math.inf))
        return replace(link, received=received, limits=limits) if received else link

    def _measured(self, k: int, link: Link, made: Made, other: Sequence[Point]) -> Link:
        """``link``, where some points are not as they were: whether they are ever the same, and how rounded."""
        if self.speaks:
            return replace(link, limits={**link.limits, **limits_of(made.tensors, {}, other, self.inside)})
        self._draws_others = True  # nobody knows when a loss drew its own
        twice = self._again(self._reference, self._batches[k]).tensors
        self._draws_others = False
        found = limits_of(made.tensors, twice, other, self.inside)
        if any(self._distance(k, at, link.gives[at]) > found[at] for at in other):  # two runs are nearer than that
            found = limits_of(made.tensors, self._in_fp64(k), other, self.inside)
        strange = frozenset(at for at in other if not comes_again(made.tensors[at], twice.get(at), found[at]))
        return replace(link, limits={**link.limits, **found}, strange=strange)

    def _distance(self, k: int, at: Point, due: Sketch) -> float:
        seen = seen_at(self._calls[k], at)
        return math.inf if seen is None else seen.distance(due)

    def _in_fp64(self, k: int) -> Mapping[Point, Tensor]:
        try:
            return self._again(self._wide, self._batches[k].cast(torch.float64)).tensors
        except Exception:  # no one type: it is the user's code, which may know of one type only
            return {}

    @cached_property
    def _wide(self) -> Reference:
        return self._reference.of(widened(copied(self._model)))

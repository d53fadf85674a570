"""A rank's own links of the chain: its stages are rerun, each call as it was, and what that gives.

A call is rerun on the inputs that it had, and its backward on the output gradients that came to it. So each link is
held against what it was given, right or wrong; the loss is a link of its own.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.limits import precision_of
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import raised
from pipeproof.observers.calls import Call
from pipeproof.observers.elements import is_rounded
from pipeproof.observers.recording import HANDED_ON, MADE, RECEIVED
from pipeproof.observers.sketch import Sketch, sketch
from pipeproof.observers.speaking import Speaking
from pipeproof.observers.tensors_in import tensors_in
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.again import Again, Called, State, flowed
from pipeproof.reference.copied import copied
from pipeproof.reference.data import Batch
from pipeproof.reference.drawn_from import KeptElsewhere
from pipeproof.reference.generators import states_on
from pipeproof.reference.otherwise import one_place_off, widened
from pipeproof.reference.step import Contribution, Expected, Gradient, Loss, LossError, Recipe, Reference, Site
from pipeproof.wings.composed.envelope import Envelope, Envelopes, Made
from pipeproof.wings.composed.link import Link, Point, flow_of, seen_at
from pipeproof.wings.composed.loss_link import LossDue, LossLink, factor_at, factors_of, scale_flows, take_target

_RAISED = "run again, stage {} raised {}"
_KEPT = (
    "stage {} draws from a state of random numbers that is kept elsewhere: pass who keeps it in generators= of Composed"
)
_DRAWS = "{} draws from a {} of {} that is not part of it: pass it in generators= of Composed"
_ATTRIBUTES = (
    "stage {} gives the same again only where attributes are put back that changed since: {}; call its module with "
    "what it needs of them"
)
_IN_BACKWARD = (
    "the backward of stage {} draws random numbers, which are others when it is rerun: what runs again in it, as in a "
    "checkpoint, must draw what its forward drew (preserve_rng_state=True)"
)
_FORM = (
    "stage {} gave an output of shape {} and, run again, gives {}: if ranks pass on parts of it, that is not checked so"
)


class StageRerun:
    """A stage of this rank, as its ``calls`` used it: a model of its own, with the weights that it has now.

    ``loss``: what comes after it, if it is the last one. ``in_parts``: it is cut inside among ranks, so that it rounds
    otherwise where it is put together.
    """

    def __init__(
        self,
        stage: int,
        module: nn.Module,
        calls: Sequence[Call],
        *,
        loss: LossLink | None,
        accumulation: Accumulation,
        in_parts: bool = False,
    ) -> None:
        self.stage, self._calls, self._loss, self._in_parts = stage, list(calls), loss, in_parts
        self.model = Again(module)
        self.loss = Loss(self._flow, 1.0)  # the objective of one call
        names = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        recipe = Recipe(self.loss, accumulation=accumulation)
        self._reference = Reference(self.model, owner=dict.fromkeys(names, stage), recipe=recipe)
        self._sums: dict[Site, Gradient] = {}
        self.links: list[Link] = []
        self.trained: Mapping[int, Tensor] = {}  # by id, what the loss trains besides what the stage gives
        # Of calls to which no multiple of what is due came back: whose target gives that, and what else it gives.
        self.pairs: dict[int, tuple[int, LossDue] | None] = {}
        self.other_form = ""  # why it is not known what it gives, where its outputs have other shapes again
        self.speaks = False  # to other ranks: then it is run no more than they run it
        self._is_same_in_training: bool | None = None  # a call in evaluation mode; None until that was tried
        self._envelopes = Envelopes(self._envelope)
        # Of the call that runs:
        self._now: int | None = None
        self._noted, self._more, self._due = dict[Point, Tensor](), dict[int, Tensor](), LossDue()
        self._then: Mapping[torch.device, Tensor] = {}  # random numbers where its backward begins
        self._output: object = None
        self._disturb = False

    def run(self) -> None:
        """Rerun each call once, in the order in which gradients were added up."""
        found: dict[int, Link] = {}
        drawing = False
        for k in self._order:
            in_place = self._reference.recipe.accumulation == PLAIN  # no microbatch's are there beside the sum
            try:
                with nullcontext() if found else Speaking() as speaking:
                    made = self._made(self._reference, k, onto=self._sums if in_place and self._calls[k].ran else {})
            except Exception as error:  # no one type: it is the user's code that runs, on what may be wrong
                self._note_form(k, self._noted)
                kept = isinstance(error, KeptElsewhere)
                told = _KEPT.format(self.stage) if kept else _RAISED.format(self.stage, raised(error))
                found[k] = Link({}, obstacle=self.other_form or told)
                continue
            if speaking is not None:
                self.speaks, now = speaking.spoke, states_on(self._then)
                drawing = any(not torch.equal(now[device], state) for device, state in self._then.items())
            self._note_form(k, made.tensors)
            found[k] = Link({}, obstacle=self.other_form) if self.other_form else self._link(k, made)
            if made.contribution is not None and self._calls[k].ran and not self.other_form:
                self._add(made.contribution, in_place=in_place)
                self._add_of_loss(k, found[k], made.due)
        self.links = [found[k] for k in range(len(self._calls))]
        if drawing and not self.speaks:
            self.doubt(_IN_BACKWARD.format(self.stage))

    def _add(self, contribution: Contribution, *, in_place: bool) -> None:
        if in_place:
            self._sums |= {site: one for site, one in contribution.gradients.items() if one is not None}
        else:
            self._sums = self._reference.accumulate([contribution], orders={self.stage: [0]}, onto=self._sums)

    def _add_of_loss(self, k: int, link: Link, due: LossDue) -> None:
        """Add what the loss of call ``k`` gives to weights of this stage, in the multiple that came back to it."""
        came = next((at for at in link.gives if at[0] == RECEIVED), None)
        factor = 1.0 if came is None else factor_at(self._calls[k], link, came) or 1.0
        more = Contribution(0.0, {site: one * factor for site, one in self._of_loss(due).items()})
        if more.gradients:
            self._sums |= self._reference.accumulate([more], orders={self.stage: [0]}, onto=self._sums)

    def _of_loss(self, due: LossDue) -> dict[Site, Tensor]:
        """What a loss gives to weights of this stage."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return {(self.stage, names[id(one)]): gradient for one, gradient in due.trained if id(one) in names}

    def _with_loss(self, made: Made) -> Made:
        """``made``, with what its loss gives to weights of this stage."""
        own = Contribution(0.0, {}) if made.contribution is None else made.contribution
        gradients = dict(own.gradients)
        for site, one in self._of_loss(made.due).items():
            there = gradients.get(site)
            gradients[site] = one if there is None else there + one
        return replace(made, contribution=replace(own, gradients=gradients))

    @property
    def gradients(self) -> dict[str, Gradient]:
        """What the step must have added up in each parameter, by its name in the stage."""
        every = self.model.named_parameters(remove_duplicate=False)
        return {name: self._sums.get((self.stage, name)) for name, _ in every}

    @property
    def closed(self) -> bool:
        """Whether what its calls give is known."""
        return all(link.closed for link in self.links)

    @cached_property
    def narrowest(self) -> torch.dtype | None:
        """The narrowest type in which it computes."""
        casts = [kind for k in range(len(self._calls)) for on, kind in self._kept(k).state.autocast.values() if on]
        types = [*casts, *(one.dtype for one in self.model.parameters() if is_rounded(one.dtype))]
        return max(types, key=lambda one: precision_of(one).unit, default=None)

    @property
    def inside(self) -> torch.dtype | None:
        """That of a stage in parts: sums over ranks are rounded there."""
        return self.narrowest if self._in_parts else None

    @property
    def drew(self) -> bool:
        """Whether a call drew random numbers when it was rerun."""
        return bool(self.model.__dict__["drew"])

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
    def factors(self) -> list[float | None]:
        """How many times what is due came back from the loss: one number, None if several, none if nothing is due."""
        return factors_of(self._calls, self.links)

    def times(self, factor: float) -> None:
        """What is due from the loss is so many times that."""
        self.links = [scale_flows(link, factor) for link in self.links]

    def take_pairs(self) -> None:
        """Calls were meant for the microbatches whose targets they met."""
        for k, pair in self.pairs.items():
            self.links[k] = take_target(self._calls[k], self.links[k], pair[1] if pair else LossDue())

    @property
    def unreached(self) -> list[str]:
        """The parameters to be trained to which no call contributes, where any should."""
        wanting = [name for name, one in self.model.named_parameters() if one.requires_grad and self.links]
        return [name for name in wanting if self._sums.get((self.stage, name)) is None]

    @property
    def other(self) -> bool:
        """Whether anything that its calls give is not what they gave."""
        return any(link.limits for link in self.links)

    @property
    def single_names(self) -> list[str]:
        """The stage's parameters, each by the first of its names."""
        return [name for name, _ in self.model.named_parameters()]

    @cached_property
    def expected(self) -> Expected:
        """The stage's own step, with what each of its calls contributes: of this are causes made."""
        contributions = self._reference.contribute(self.batches)
        losses = tuple(one.loss for one in contributions)
        orders = {self.stage: range(len(contributions))}
        sums = self._reference.accumulate(contributions, orders=orders) if contributions else dict[Site, Gradient]()
        return Expected("train", losses, sum(losses), contributions, self._weights, gradients=sums)

    @property
    def _weights(self) -> dict[str, Tensor]:
        return {name: one.detach() for name, one in self.model.named_parameters(remove_duplicate=False)}

    @property
    def batches(self) -> list[Batch]:
        """What the calls that contribute were given, in the order of their backwards."""
        return [self._batch(k) for k in self.numbers]

    @property
    def numbers(self) -> list[int]:
        """The calls that contribute, in the order of their backwards."""
        return [k for k in self._order if self._calls[k].ran]

    @cached_property
    def _order(self) -> list[int]:
        ends = {k: call.ran[0] for k, call in enumerate(self._calls) if call.ran}
        return sorted(range(len(self._calls)), key=lambda k: (k not in ends, ends.get(k, k)))

    def _kept(self, k: int) -> Called:
        again = self._calls[k].again
        assert again is not None, "the calls of a stage that is checked so are kept"
        return again

    def _batch(self, k: int) -> Batch:
        again = self._kept(k)
        tensors = [one.requires_grad_(n in again.wanting) for n, one in enumerate(again.tensors)]
        return Batch((again, *tensors), again.flows, 1)  # type: ignore[arg-type]  # the model takes what it is

    def _flow(self, output: Any, flows: Any) -> Tensor:
        """The objective of a call: what came back to its output. Notes what it gave, and what is due from the loss."""
        k = self._now
        if k is not None:
            self._noted = {(MADE, n): one.detach() for n, one in enumerate(tensors_in(output))}
        found = flowed(output, flows, tensors=tensors_in, note=self._more.__setitem__)
        if k is not None:
            if self._loss is not None:
                self._due = self._loss.due(k, output, call=self._calls[k], model=self.model, disturb=self._disturb)
                self._output = output
            self._then = states_on(self._kept(k).state.drawn)
        return found

    def _made(self, reference: Reference, k: int, *, onto: Mapping[Site, Gradient] = MappingProxyType({})) -> Made:
        """Run call ``k``. What it contributes is added to ``onto``, in place."""
        self._noted, self._more, self._due, self._now = {}, {}, LossDue(), k
        batch = self._batch(k)
        contribution = None
        try:
            with suppress(LossError):
                given = batch if reference is self._reference else batch.cast(torch.float64)
                contribution = reference.contribution(given, self.loss.function, self.loss.divisor, onto=onto)
        finally:
            self._now = None
        tensors = {**self._noted, **{(RECEIVED, n): one for n, one in self._due.flows.items()}}
        for n, one in (contribution.inputs if contribution is not None else {}).items():
            if one is not None:
                tensors[HANDED_ON, n - 1] = one  # the first input is the call itself
        return Made(tensors, self._more, contribution, self._due)

    def _link(self, k: int, made: Made) -> Link:
        gives = {at: sketch(one, known=seen_at(self._calls[k], at)) for at, one in made.tensors.items()}
        self.trained = {**self.trained, **{id(one): one for one, _ in made.due.trained}}
        loss, output = made.due.loss, self._output
        self._output = None
        own = Link(gives, mode_matters=self._mode_matters(k))
        if loss is not None:
            owes = bool(made.due.trained) or any(at[0] == RECEIVED and one.norm for at, one in gives.items())
            own = replace(own, loss=loss.item(), loss_type=loss.dtype, owes=owes)
        link = self._received(k, made.more, own)
        seen = {at: seen_at(self._calls[k], at) for at in gives}
        other = [at for at, one in seen.items() if one is not None and one.digest != gives[at].digest]
        if not other:
            return link
        if self._loss and any(self._is_of_another(seen[at], gives[at]) for at in other if at[0] == RECEIVED):
            self.pairs[k] = self._loss.of_another(k, output, call=self._calls[k], model=self.model)
        if drawn := self.model.drawn_from:
            kind = type(drawn[1])
            maker = kind.__module__.partition(".")[0]
            return Link({}, obstacle=_DRAWS.format(drawn[0] or f"stage {self.stage}", kind.__name__, maker))
        names = self.model.changed_since(self._kept(k)) if any(where == MADE for where, _ in other) else []
        if names and not self.speaks and self._gives(k, self._kept(k).state.with_attributes()):
            return Link({}, obstacle=_ATTRIBUTES.format(self.stage, first_few(names)))
        return self._measured(k, link, made, other)

    @staticmethod
    def _is_of_another(seen: Sketch | None, due: Sketch) -> bool:
        """Whether what came back to a call is no multiple of what is due from its loss."""
        return seen is not None and seen.factor(due) is None

    def _note_form(self, k: int, made: Mapping[Point, Tensor]) -> None:
        for (where, number), one in made.items():
            seen = seen_at(self._calls[k], (where, number))
            if where == MADE and seen is not None and seen.shape != tuple(one.shape):
                self.other_form = _FORM.format(self.stage, list(seen.shape), list(one.shape))

    def _mode_matters(self, k: int) -> bool:
        """Whether a call that was in evaluation mode would have given something else in training mode: one tells."""
        if self._calls[k].training or self.speaks:
            return not self._calls[k].training
        if self._is_same_in_training is None:
            self._is_same_in_training = self._gives(k, self._kept(k).state.in_training())
        return not self._is_same_in_training

    def _gives(self, k: int, state: State) -> bool:
        """Whether a call gives what it gave, in this ``state``."""
        again = self._kept(k)
        try:
            with torch.no_grad():
                made = tensors_in(self.model(replace(again, state=state), *again.tensors))
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
            least = {at: precision_of(self.inside or made.tensors[at].dtype).least for at in other}
            return replace(link, limits={**link.limits, **least})
        seen = {at: (seen_at(self._calls[k], at), link.gives[at]) for at in other}
        limits, strange = self._envelopes.of_call(k, made, seen)
        apart = self._envelopes.loss_apart
        return replace(link, limits={**link.limits, **limits}, strange=strange, loss_apart=apart)

    def _envelope(self, k: int, made: Made | None) -> Envelope:
        """What rounding does to call ``k``, which ``made`` that in its first run."""
        self._disturb = True  # nobody knows when a loss drew its own
        twice = self._with_loss(self._made(self._reference, k))
        self._disturb, self._output = False, None
        runs = partial(self._in_fp64, k), partial(self._off, k)
        return Envelope(made or twice, twice, *runs, narrowest=self.narrowest, inside=self.inside)

    def floor(self, name: str, size: float) -> Floor | None:
        """What rounding may do to the gradient of a parameter, whose norm is ``size``; None where none is measured."""
        site = self.stage, name
        if self.speaks or (total := self._sums.get(site)) is None:
            return None
        envelope = self._envelopes.of_sum({k: flow_of(self._calls[k]) for k in self.numbers})
        return envelope.gradient(site, total, calls=len(self.numbers), size=size)

    def _in_fp64(self, k: int) -> Made | None:
        try:
            return self._with_loss(self._made(self._wide, k))
        except Exception:  # no one type: it is the user's code, which may know of one type only
            return None
        finally:
            self._output = None  # it holds a graph

    def _off(self, k: int) -> Contribution | None:
        blank = Expected("train", (), 0.0, before=self._weights)
        if self._envelopes.is_full:  # four more runs of a stage are enough
            return None
        try:
            return one_place_off(self._reference, blank, [self._batch(k)])[0]
        except Exception:  # no one type: it is the user's code
            return None

    @cached_property
    def _wide(self) -> Reference:
        return self._reference.of(widened(copied(self.model)))

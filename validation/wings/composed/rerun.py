"""A rank's own links in the chain: reruns of its stages, call by call, and their results.

A call reruns on its inputs, and its backward on its output gradients in the step. So each link is checked against its
own input, right or wrong; the loss is a separate link.
"""

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import cached_property, partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from pipeproof.core.limits import precision_of
from pipeproof.core.observe.calls import Call
from pipeproof.core.observe.elements import is_rounded
from pipeproof.core.observe.recording import HANDED_ON, MADE, RECEIVED
from pipeproof.core.observe.sketch import Sketch, sketch
from pipeproof.core.observe.speaking import Speaking
from pipeproof.core.observe.tensors_in import tensors_in
from pipeproof.core.tolerance import Floor
from pipeproof.core.verdict import describe_error
from pipeproof.pipeline.sizes import first_few
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.again import Again, State, objective_of
from pipeproof.reference.copied import deep_copy
from pipeproof.reference.data import Batch
from pipeproof.reference.drawn_from import KeptElsewhere
from pipeproof.reference.generators import states_on
from pipeproof.reference.otherwise import one_place_off, widen
from pipeproof.reference.step import Contribution, Expected, Gradient, Loss, LossError, Recipe, Reference, Site
from pipeproof.wings.composed.link import Link, Point, sketch_at
from pipeproof.wings.composed.loss import LossExpected, LossLink, copy_call, factor_at
from pipeproof.wings.composed.rounding import Envelopes, Made

_RAISED = "run again, stage {} raised {}"
_KEPT = (
    "stage {} draws from random numbers whose state is kept elsewhere: pass its keeper in generators= of StageByStage"
)
_DRAWS = "{} draws from a {} of {} that is not part of it: pass it in generators= of StageByStage"
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
_CUT_DRAWS = "stage {} draws random numbers, and layers that are cut among ranks draw others than it does put together"
_ALIKE = (
    "stage {} gives something else when it is put together than its ranks gave, all alike: a layer may be written for "
    "a rank's part, as attention with that one's number of heads, or all ranks are wrong alike"
)


class StageRerun:
    """A stage of this rank, used by its ``calls`` as a separate model, with current weights.

    ``loss``: follows the last stage. ``in_parts``: ranks share the stage, so the assembled stage rounds differently.
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
        self.stage, self._calls, self._loss = stage, list(calls), loss
        self.model = Again(module)
        self.loss = Loss(partial(objective_of, tensors=tensors_in), 1.0)  # objective for a single call
        recipe = Recipe(self.loss, accumulation=accumulation)
        self._reference = Reference(self.model, owner=dict.fromkeys(self._weights, stage), recipe=recipe)
        self._sums: dict[Site, Gradient] = {}
        self.links: list[Link] = []
        self.trained: Mapping[int, Tensor] = {}  # by id, what the loss trains besides what the stage gives
        # For calls with a gradient unlike the expected: the call whose target explains it, with its loss.
        self.pairs: dict[int, tuple[int, LossExpected] | None] = {}
        self.other_form = ""  # reason for unknown results, if a rerun changes output shapes
        self.speaks = False  # sends to other ranks, so all must rerun equally often
        self._is_same_in_training: bool | None = None  # a call in evaluation mode; None until that was tried
        casts = [kind for call in calls for on, kind in copy_call(call).state.autocast.values() if on]
        types = [*casts, *(one.dtype for one in self.model.parameters() if is_rounded(one.dtype))]
        self.narrowest: torch.dtype | None = max(types, key=lambda one: precision_of(one).unit, default=None)
        self.inside = self.narrowest if in_parts else None  # sums over ranks round in it
        self._envelopes = Envelopes(self._again, self._in_fp64, self._off, narrowest=self.narrowest, inside=self.inside)

    def run(self) -> None:
        """Rerun each call once, in the order of accumulation."""
        found: dict[int, Link] = {}
        drawing = False
        for k in self._order:
            in_place = self._reference.recipe.accumulation == PLAIN  # without separate gradients for each microbatch
            made, problem = Made(k), ""
            try:
                with nullcontext() if found else Speaking() as speaking:
                    self._run(self._reference, made, onto=self._sums if in_place and self._calls[k].ran else {})
            except Exception as error:  # all types: user code runs, perhaps on wrong inputs
                kept = isinstance(error, KeptElsewhere)
                problem = _KEPT.format(self.stage) if kept else _RAISED.format(self.stage, describe_error(error))
            if speaking is not None and not problem:
                self.speaks, now = speaking.spoke, states_on(made.drawn)
                drawing = any(not torch.equal(now[device], state) for device, state in made.drawn.items())
            for (where, number), one in made.tensors.items():
                observed = sketch_at(self._calls[k], (where, number))
                if where == MADE and observed is not None and observed.shape != tuple(one.shape):
                    self.other_form = _FORM.format(self.stage, list(observed.shape), list(one.shape))
            obstacle = self.other_form or problem
            found[k] = Link(obstacle=obstacle) if obstacle else self._link(made)
            made.output = None
            if made.contribution is not None and self._calls[k].ran and not obstacle:
                self._add(made, found[k], in_place=in_place)
        self.links = [found[k] for k in range(len(self._calls))]
        if drawing and not self.speaks:
            self.doubt(_IN_BACKWARD.format(self.stage))

    def _add(self, made: Made, link: Link, *, in_place: bool) -> None:
        """Add what a call contributes, and its loss's gradients of stage weights, in the observed multiple."""
        assert made.contribution is not None, "it ran"
        if in_place:
            self._sums |= {site: one for site, one in made.contribution.gradients.items() if one is not None}
        came = next((at for at in link.gives if at[0] == RECEIVED), None)
        factor = 1.0 if came is None else factor_at(self._calls[made.k], link, came) or 1.0
        of_loss = Contribution(0.0, {site: one * factor for site, one in self._of_loss(made.loss).items()})
        for one in [of_loss] if in_place else [made.contribution, of_loss]:
            if one.gradients:
                self._sums |= self._reference.accumulate([one], orders={self.stage: [0]}, onto=self._sums)

    def _of_loss(self, loss: LossExpected) -> dict[Site, Tensor]:
        """Return a loss's gradients of this stage's weights."""
        names = {id(one): name for name, one in self.model.named_parameters()}
        return {(self.stage, names[id(one)]): gradient for one, gradient in loss.trained if id(one) in names}

    @property
    def gradients(self) -> dict[str, Gradient]:
        """The gradient that the step must accumulate in each parameter, by the stage's names."""
        return {name: self._sums.get((self.stage, name)) for name in self._weights}

    @property
    def closed(self) -> bool:
        """True if the results of all calls are known."""
        return all(link.closed for link in self.links)

    def doubt(self, why: str) -> None:
        """Mark the results of all calls unknown, for this reason."""
        self.links = [Link(obstacle=why) for _ in self.links]

    def doubt_alike(self, others: Sequence[Sequence[Call]]) -> None:
        """Mark all results of a stage that is cut inside unknown, unless different outputs of ranks prove one wrong.

        ``others``: its calls on each other rank of the replica. An assembled stage is other code.
        """
        wrong = [
            (k, slice(number, number + 1))
            for k, (call, link) in enumerate(zip(self._calls, self.links, strict=True))
            for where, number in link.gives
            if where == MADE and (one := sketch_at(call, (where, number))) is not None
            if not link.is_right((where, number), one)
        ]
        if wrong and self.model.__dict__["drew"]:
            self.doubt(_CUT_DRAWS.format(self.stage))
        elif wrong and all(
            [one.digest for one in calls[k].outputs[n]] == [one.digest for one in self._calls[k].outputs[n]]
            for k, n in wrong
            for calls in others
        ):
            self.doubt(_ALIKE.format(self.stage))

    @property
    def factors(self) -> list[float | None]:
        """How many times the expected came back from the loss: one number, None if several, nothing if none is."""
        pairs = [(call, link, at) for call, link in zip(self._calls, self.links, strict=True) for at in link.gives]
        every = [(call, link, at) for call, link, at in pairs if at[0] == RECEIVED and link.gives[at].norm]
        if not every:
            return []
        found = [factor_at(*one) for one in every]
        within, first = max(precision_of(link.gives[at].dtype).least for _, link, at in every), found[0]
        alike = first is not None and all(one is not None and abs(one - first) <= within * abs(first) for one in found)
        return [first] if alike else [None]

    def times(self, factor: float) -> None:
        """Multiply the expected gradients from the loss; they become rounded, as products may have another order."""
        for k, link in enumerate(self.links if factor != 1.0 else ()):
            own = {at: one for at, one in link.gives.items() if at[0] == RECEIVED and one.norm}
            limits = {at: precision_of(one.dtype).least for at, one in own.items()}
            more = {at: one.times(factor) for at, one in own.items()}
            self.links[k] = replace(link, gives={**link.gives, **more}, limits={**limits, **link.limits})

    def take_pairs(self) -> None:
        """Adopt the microbatches whose targets the calls met, with their losses' gradients."""
        for k, (_, other) in ((k, pair) for k, pair in self.pairs.items() if pair is not None):
            flows, link = self._calls[k].output_gradients, self.links[k]
            came = {(RECEIVED, n): flows[n] for n in other.flows if n in flows}
            if other.value is not None:
                self.links[k] = replace(link, gives={**link.gives, **came}, loss=other.value.item())

    @property
    def unreached(self) -> list[str]:
        """Trainable parameters that calls left without a contribution; empty without calls."""
        wanting = [name for name, one in self.model.named_parameters() if one.requires_grad and self.links]
        return [name for name in wanting if self._sums.get((self.stage, name)) is None]

    @property
    def single_names(self) -> list[str]:
        """Parameters of the stage, each under its first name."""
        return [name for name, _ in self.model.named_parameters()]

    @cached_property
    def expected(self) -> Expected:
        """The stage's own step, with each call's contribution; causes are computed from it."""
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
        """Inputs of contributing calls, in the order of backwards."""
        return [self._batch(k) for k in self.numbers]

    @property
    def numbers(self) -> list[int]:
        """Contributing calls, in the order of backwards."""
        return [k for k in self._order if self._calls[k].ran]

    @cached_property
    def _order(self) -> list[int]:
        ends = {k: call.ran[0] for k, call in enumerate(self._calls) if call.ran}
        return sorted(range(len(self._calls)), key=lambda k: (k not in ends, ends.get(k, k)))

    def _batch(self, k: int) -> Batch:
        again = copy_call(self._calls[k])
        tensors = [one.requires_grad_(n in again.wanting) for n, one in enumerate(again.tensors)]
        return Batch((again, *tensors), again.flows, 1)  # type: ignore[arg-type]  # the model takes what it is

    def _run(self, reference: Reference, made: Made, *, onto: Mapping[Site, Gradient] = MappingProxyType({})) -> Made:
        """Run a call. What it contributes is added to ``onto``, in place."""
        call, batch = self._calls[made.k], self._batch(made.k)

        def flow(output: Any, flows: Any) -> Tensor:
            made.tensors |= {(MADE, n): one.detach() for n, one in enumerate(tensors_in(output))}
            found = objective_of(output, flows, tensors=tensors_in, note=made.more.__setitem__)
            made.output = output
            if self._loss is not None:
                made.loss = self._loss.expect(made.k, output, call=call, model=self.model, disturb=made.disturb)
            made.drawn = states_on(copy_call(call).state.drawn)
            return found

        with suppress(LossError):
            given = batch if reference is self._reference else batch.cast(torch.float64)
            made.contribution = reference.contribution(given, flow, self.loss.divisor, onto=onto)
        made.tensors |= {(RECEIVED, n): one for n, one in made.loss.flows.items()}
        inputs = {} if made.contribution is None else made.contribution.inputs
        made.tensors |= {(HANDED_ON, n - 1): one for n, one in inputs.items() if one is not None}  # first is the call
        return made

    def _run_with_loss(self, reference: Reference, made: Made) -> Made:
        """Run a call for its envelope, and add the loss's gradients of stage weights to what it contributes."""
        own = self._run(reference, made).contribution or Contribution(0.0, {})
        gradients = dict(own.gradients)
        for site, one in self._of_loss(made.loss).items():
            there = gradients.get(site)
            gradients[site] = one if there is None else there + one
        return replace(made, contribution=replace(own, gradients=gradients), output=None)

    def _link(self, made: Made) -> Link:
        k, call, model = made.k, self._calls[made.k], self.model
        gives = {at: sketch(one, known=sketch_at(call, at)) for at, one in made.tensors.items()}
        self.trained = {**self.trained, **{id(one): one for one, _ in made.loss.trained}}
        loss, link = made.loss.value, Link(gives, mode_matters=self._mode_matters(k))
        if loss is not None:
            owes = bool(made.loss.trained) or any(at[0] == RECEIVED and one.norm for at, one in gives.items())
            link = replace(link, loss=loss.item(), loss_type=loss.dtype, owes=owes)
        received, limits = dict[int, Sketch](), dict[Point, float]()
        for n, more in made.more.items():  # gradient of some outputs, from other outputs
            whole, least = copy_call(call).flows[n].to(more.device), precision_of(more.dtype).least
            rest, size = whole - more, (whole.norm() + more.norm()).item()
            rest = torch.zeros_like(rest) if rest.norm().item() <= least * size else rest  # that is rounding
            received[n] = sketch(rest)
            limits[RECEIVED, n] = least * max(1.0, size / (rest.norm().item() or math.inf))
        link = replace(link, received=received, limits=limits)
        pairs = ((at, sketch_at(call, at), one) for at, one in gives.items())
        other = {at: (one, it) for at, one, it in pairs if one is not None and one.digest != it.digest}
        if not other:
            return link
        if self._loss and any(one.factor(it) is None for (where, _), (one, it) in other.items() if where == RECEIVED):
            self.pairs[k] = self._loss.of_another(k, made.output, call=call, model=model)
        if drawn := model.drawn_from:
            kind = type(drawn[1])
            maker = kind.__module__.partition(".")[0]
            return Link(obstacle=_DRAWS.format(drawn[0] or f"stage {self.stage}", kind.__name__, maker))
        names = model.list_changed(copy_call(call)) if any(where == MADE for where, _ in other) else []
        if names and not self.speaks and self._gives(k, copy_call(call).state.with_attributes()):
            return Link(obstacle=_ATTRIBUTES.format(self.stage, first_few(names)))
        if self.speaks:
            own = {at: precision_of(self.inside or made.tensors[at].dtype).least for at in other}
            return replace(link, limits={**limits, **own})
        own, strange, apart = self._envelopes.of_call(made, other)
        return replace(link, limits={**limits, **own}, strange=strange, loss_apart=apart)

    def _mode_matters(self, k: int) -> bool:
        """True if training mode changes a call that ran in evaluation mode; tries one call."""
        if self._calls[k].training or self.speaks:
            return not self._calls[k].training
        if self._is_same_in_training is None:
            self._is_same_in_training = self._gives(k, copy_call(self._calls[k]).state.in_training())
        return not self._is_same_in_training

    def _gives(self, k: int, state: State) -> bool:
        """True if a call repeats its results in this ``state``."""
        again = copy_call(self._calls[k])
        try:
            with torch.no_grad():
                made = tensors_in(self.model(replace(again, state=state), *again.tensors))
        except Exception:  # all types: user code runs
            return False
        return [sketch(one).digest for one in made] == [one.digest for one in self._calls[k].outputs]

    def _again(self, k: int) -> Made:
        return self._run_with_loss(self._reference, Made(k, disturb=True))  # when a loss draws is not known

    def _in_fp64(self, k: int) -> Made | None:
        try:
            return self._run_with_loss(self._reference.of(widen(deep_copy(self.model))), Made(k))
        except Exception:  # all types: user code, which may support a single dtype
            return None

    def _off(self, k: int) -> Contribution | None:
        """Return a call's contribution with weights one rounding off; None if that fails."""
        blank = Expected("train", (), 0.0, before=self._weights)
        try:  # four more runs of a stage are enough
            return None if self._envelopes.is_full else one_place_off(self._reference, blank, [self._batch(k)])[0]
        except Exception:  # all types: user code
            return None

    def floor(self, name: str, size: float) -> Floor | None:
        """Return the rounding of a parameter's gradient with norm ``size``; None if unmeasured."""
        site = self.stage, name
        if self.speaks or (total := self._sums.get(site)) is None:
            return None
        flows = {k: self._calls[k].output_gradients.values() for k in self.numbers}
        sizes = {k: max((one.norm for one in came), default=0.0) for k, came in flows.items()}
        return self._envelopes.of_sum(site, total, sizes, size=size)

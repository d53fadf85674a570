"""The composed check: what it is told."""

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import InitVar, dataclass, field, fields, replace
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from pipeproof.core.contract import DEFAULTS, Contract
from pipeproof.foreign.expectation import OF_A_MODEL
from pipeproof.foreign.loss_of_all import LossOfAll
from pipeproof.foreign.task import (
    LossFn,
    WhiteBoxError,
    check_builds,
    check_loss_fn,
    check_module,
    name_of,
)
from pipeproof.observers.digest import digest
from pipeproof.observers.shards import held_here
from pipeproof.records.step_expectation import StepExpectation
from pipeproof.reference.accumulation import PLAIN, Accumulation
from pipeproof.reference.generators import Generator, is_generator
from pipeproof.reference.snapshot import Snapshot, unchanged
from pipeproof.reference.step import clip_factor
from pipeproof.worlds.drawing import drawing_apart

_LOST = (
    "stages were run again, and what this changed in the job cannot be put back: {}; keep it where neither they nor "
    "the loss lead to, or check against a SingleDevice"
)
_ONE_BY_ONE = "one by one"
# What only a running job has, by the fields that say it.
_OF_A_JOB = dict.fromkeys(("optimizer", "masters", "scaler", "generators"), "is a rank's own, and no rank runs yet")
_OF_A_JOB |= dict.fromkeys(("every", "stages"), "is about many steps")
_READ = ("loss_divisor", "loss_scale", "accumulation", "warmup", "ties")


@dataclass(frozen=True)
class AgainstItself(StepExpectation):
    """A step is held against itself, link by link, so that no rank needs more of the model than it has.

    Every rank runs its own stages again, from what they were given in the step. What a stage gave must be what it gives
    again; what one stage received must be what another sent; gradients must be the sums of what microbatches give. If
    every link holds, the step is what one device would have made.

    loss_fn: of the last stage's output and the target, a microbatch's loss, undivided. None: the last stage gives it.
    build: makes the whole model; on the meta device, so that it takes no memory. With it, stages are to hold each of
    its parameters once. host: keep what stages were given in the host's memory, and not where they compute.
    every: check one step of so many, the first one first; the others run as if nobody checked, and are not ``due``.
    stages: "all" are run again in a step that is checked, or "one by one", so that a step costs little more.
    optimizer: this rank's, or a list of several. With it, weights after its step are compared with what a copy of it
    makes of the gradients, clipped to ``max_norm`` of the contract. masters: the copies in a wider type that the
    optimizer holds in place of weights, by weight: a copy moves, and then the weight is that, cast. scaler: the one
    that scales this rank's losses, such as a ``torch.amp.GradScaler``; call its ``unscale_`` before ``gradients()``.
    generators: what stages draw random numbers from besides torch's, Python's, numpy's and their modules' own
    generators: generators of these three, and keepers with ``get_states`` and ``set_states``, such as Megatron's
    tracker. contract: what the step claims; ``loss_divisor``, ``loss_scale``, ``accumulation``, ``max_norm``,
    ``warmup``, ``ties`` and ``stages`` are read. The divisor is that of all replicas together.

    As ``reference=`` of ``whitebox.validate`` it takes neither ``optimizer``, nor ``masters``, ``scaler`` and
    ``generators``, nor ``every`` and ``stages``: these are of a running job.
    """

    loss_fn: Callable[[Any, Any], Tensor] | LossOfAll | None = None
    build: Callable[[], nn.Module] | None = None
    host: bool = False
    optimizer: Optimizer | Sequence[Optimizer] | None = None
    masters: Mapping[nn.Parameter, Tensor] | None = None
    scaler: Any = None
    generators: Sequence[Generator] = ()
    every: int = 1
    stages: Literal["all", "one by one"] = "all"
    contract: Contract = DEFAULTS
    loss_divisor: InitVar[float | None] = None  # that of the contract
    _steps: list[int] = field(default_factory=lambda: [0], init=False, repr=False, compare=False)

    def __post_init__(self, loss_divisor: float | None) -> None:
        if loss_divisor is not None:
            object.__setattr__(self, "contract", self.contract.with_words({"loss_divisor": loss_divisor}))

    def of_a_step(self, loss_fn: LossFn | None, contract: Contract) -> Self:
        """The same, of a step that is run to be checked, with what was said beside it. Raises ``WhiteBoxError``."""
        for one in fields(self):
            if one.name in _OF_A_JOB and getattr(self, one.name) != one.default:
                raise WhiteBoxError(f"{one.name}= of Composed {_OF_A_JOB[one.name]}: leave it out, or use check_step")
        if (loss_fn is not None and self.loss_fn is not None) or DEFAULTS not in (contract, self.contract):
            word = "contract" if DEFAULTS not in (contract, self.contract) else "loss_fn"
            raise WhiteBoxError(f"{word} is given twice, also to Composed: give it once")
        said = contract if self.contract == DEFAULTS else self.contract
        said.reads((*_READ, "names", "stages"), "where a step is held against itself up to its gradients", OF_A_MODEL)
        found = replace(self, loss_fn=loss_fn or self.loss_fn, contract=said)
        found.check()
        return found

    def whole(self) -> nn.Module | None:
        """The whole model, on the meta device; None where nobody makes it. Raises ``WhiteBoxError``."""
        if self.build is None:
            return None
        with drawing_apart(), torch.device("meta"):
            model = self.build()
        check_module(f"build, {name_of(self.build)}, returned", model)
        return model

    def turn(self) -> int | None:
        """The number of the next step among those that are checked; None where it is not. Every call is a step."""
        step, every = self._steps[0], self.every if isinstance(self.every, int) and self.every > 0 else 1
        self._steps[0] += 1
        return None if step % every else step // every

    def check(self) -> None:
        """Raise ``WhiteBoxError`` for what no step can be held against."""
        if self.loss_fn is not None and not isinstance(self.loss_fn, LossOfAll):
            check_loss_fn(self.loss_fn)
        if not isinstance(self.contract, Contract):
            raise WhiteBoxError(f"contract is {self.contract!r}: expected a pipeproof.Contract")
        self.contract.reads((*_READ, "names", "stages", "max_norm"), "where a step is held against itself")
        if self.build is not None:
            check_builds("build", self.build)
            if self.contract.ties is not None:
                raise WhiteBoxError("ties is given beside build=, which tells which weights are one: leave one out")
        if not all(isinstance(one, Optimizer) for one in self.optimizers):
            raise WhiteBoxError(f"optimizer is {self.optimizer!r}: expected this rank's torch.optim.Optimizer")
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise WhiteBoxError(f"every is {self.every!r}: expected a number of steps, from 1")
        if self.stages not in ("all", _ONE_BY_ONE):
            raise WhiteBoxError(f'stages is {self.stages!r}: expected "all" or "{_ONE_BY_ONE}"')
        self._check_masters()
        if self.scaler is not None and not callable(getattr(self.scaler, "get_scale", None)):
            raise WhiteBoxError(
                f"scaler is {self.scaler!r}: expected a torch.amp.GradScaler, or one that has get_scale()"
            )
        if not isinstance(self.generators, Sequence) or not all(map(is_generator, self.generators)):
            raise WhiteBoxError(
                f"generators is {self.generators!r}: expected a list of generators of torch, Python or numpy, or of "
                "keepers that have get_states() and set_states()"
            )

    def _check_masters(self) -> None:
        """Raise ``WhiteBoxError`` where they are no copies of weights."""
        if self.masters is not None and not isinstance(self.masters, Mapping):
            raise WhiteBoxError(
                f"masters is {self.masters!r}: expected a mapping of weights to their copies, such as dict(zip(...))"
            )
        for weight, copy in (self.masters or {}).items():
            if not isinstance(weight, Tensor):
                raise WhiteBoxError(f"masters has a copy of {weight!r}: expected it of a weight, and not of its name")
            if not isinstance(copy, Tensor) or copy.shape != weight.shape:
                what = f"shape {list(copy.shape)}" if isinstance(copy, Tensor) else f"a {type(copy).__name__}"
                raise WhiteBoxError(f"masters has {what} for a weight of shape {list(weight.shape)}: expected its copy")

    @property
    def optimizers(self) -> tuple[Optimizer, ...]:
        """All of this rank's; none where nobody says."""
        if self.optimizer is None:
            return ()
        return tuple(self.optimizer) if isinstance(self.optimizer, Sequence) else (self.optimizer,)

    @property
    def accumulation(self) -> Accumulation:
        """How gradients are added up."""
        return self.contract.accumulation or PLAIN

    def adding_up(self, accumulation: Accumulation | None) -> Self:
        """The same, of a job that adds gradients up like this, where the contract does not say how."""
        said = replace(self.contract, accumulation=self.contract.accumulation or accumulation)
        return replace(self, contract=said)

    @property
    def max_norm(self) -> float:
        """What gradients are clipped to; infinite where they are not."""
        return self.contract.max_norm or math.inf

    @property
    def scale(self) -> float:
        """What losses are multiplied by before their backwards, as the scaler has it now, or the contract."""
        return float(self.contract.loss_scale or 1.0) if self.scaler is None else float(self.scaler.get_scale())

    @property
    def needs_norm(self) -> bool:
        """Whether what the optimizer is given depends on all ranks' gradients."""
        return self.max_norm < math.inf or self.scaler is not None

    def factor(self, norm: float) -> float | None:
        """What gradients of this norm are multiplied by before the step; None where they overflow: it is skipped."""
        if self.scaler is not None and not math.isfinite(norm):
            return None
        return clip_factor(norm, self.max_norm)

    def only(self, turn: int, stages: int) -> int | None:
        """The one stage, of so many, that is run again in the checked step of this number; None: all are."""
        return turn % stages if self.stages == _ONE_BY_ONE else None

    def unchanged(
        self,
        modules: Mapping[int, nn.Module],
        given: object,
        begun: Mapping[int, Mapping[str, bytes]],
        refuse: Callable[[str], None],
    ) -> AbstractContextManager[Snapshot]:
        """When it closes, all that ``modules``, the loss and optimizers lead to, and what is ``given``, is as it was.

        begun: digests of the weights that the step began with, by stage and name. ``refuse`` is told what is lost.
        """
        every = {k: modules[k].named_parameters(remove_duplicate=False) for k in begun}
        return unchanged(
            *(modules, self.loss_fn, self.generators, given),
            lean=[self.optimizers, self.masters, self.scaler],
            host=self.host,
            digest=lambda one: digest(held_here(one)),
            begun={id(one): begun[k][name] for k, named in every.items() for name, one in named},
            lost=lambda what: refuse(_LOST.format(what)),
        )

    def keep(self, tensor: Tensor) -> Tensor:
        """A copy of ``tensor``, where it is kept, that autograd can use wherever this was made."""
        with torch.inference_mode(False):
            return tensor.detach().to("cpu", copy=True) if self.host else tensor.detach().clone()

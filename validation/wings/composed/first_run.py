"""What the first runs of a stage's call show of all: whether it speaks to ranks, and draws in its backward."""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from pipeproof.observers.backward_lines import is_inside_a_backward
from pipeproof.observers.speaking import Speaking
from pipeproof.reference.generators import states_on
from pipeproof.reference.step import Contribution, Gradient, dense

DRAWS_AGAIN = (
    "its backward runs modules again, and what these draw depends on what was drawn meanwhile: a checkpoint must draw "
    "what its forward drew (preserve_rng_state=True)"
)


class FirstRun:
    """``speaks``: to other ranks; None until that is known. ``draws_again``: its backward runs modules again, and what
    it gives depends on the random numbers that it finds, as of a checkpoint that puts no state back. ``draws_anew``: so
    it is without such modules."""

    def __init__(self) -> None:
        self.speaks: bool | None = None
        self.draws_again = self.draws_anew = False
        self._draws = self._runs_modules = self._disturbed = False
        self._then: dict[torch.device, Tensor] | None = None

    @contextmanager
    def noting(self) -> Iterator[None]:
        """While this is open for the first time, a call is run again."""
        if self.speaks is not None:
            yield
            return
        try:
            with Speaking() as speaking:
                yield
        finally:
            self.speaks, then = speaking.spoke, self._then or {}
            now = states_on(then)
            self._draws = any(not torch.equal(now[device], state) for device, state in then.items())

    def backward_begins(self, devices: Iterable[torch.device]) -> None:
        """Next comes the backward of the call that is run, on these devices."""
        if self.speaks is None:
            self._then = states_on(devices)
        for device in devices if self._disturbed else ():
            torch.rand((), device=device)

    def find_out(self, again: Callable[[], Contribution]) -> None:
        """Where a backward drew random numbers, find out whether what it gives depends on those that it finds.

        ``again`` runs the call once more.
        """
        if not self._draws or self.speaks:
            return
        hook = register_module_forward_pre_hook(self._called)  # torch warns of such where modules are compiled
        try:
            one, same = again(), again()
            self._disturbed = True
            other = again()
        except Exception:  # no one type: it is the user's code that runs
            return
        finally:
            self._disturbed = False
            hook.remove()
        depends = _are_equal(one, same) and not _are_equal(one, other)
        self.draws_again, self.draws_anew = depends and self._runs_modules, depends and not self._runs_modules

    def _called(self, module: nn.Module, given: object) -> None:
        self._runs_modules = self._runs_modules or is_inside_a_backward()


def _are_equal(one: Contribution, other: Contribution) -> bool:
    """Whether two runs of a call gave the same, bit for bit."""
    both = zip(_given_by(one), _given_by(other), strict=True)
    return all(a is b if a is None or b is None else torch.equal(dense(a), dense(b)) for a, b in both)


def _given_by(one: Contribution) -> list[Gradient]:
    return [*one.gradients.values(), *one.inputs.values()]

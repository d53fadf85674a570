"""What a rank finds as it left it when its turn comes: random numbers, the default type, and what belongs to a rank."""

import random
import sys
import warnings
from types import ModuleType
from typing import Any

import numpy as np
import torch

from pipeproof.worlds.belongings import belongings, belongs_to_rank
from pipeproof.worlds.settings import OF_A_PROCESS, Setting
from pipeproof.worlds.simulated.own_modules import OwnModules
from pipeproof.worlds.simulated.torch_inside import SWITCHES

_numpys: Any = np.random  # its stubs leave out what sets its generator
_VALUES: tuple[Setting, ...] = (
    (torch.get_rng_state, torch.set_rng_state),
    (random.getstate, random.setstate),
    (_numpys.get_bit_generator, _numpys.set_bit_generator),  # as an object: its state takes longer than a step
)
_SWITCHES: tuple[Setting, ...] = (
    *OF_A_PROCESS,
    *SWITCHES,
)  # which people set for a block of code, and ranks take turns

belongs_to_rank(sys, "stdout", "stderr", fresh=lambda stream: stream)
belongs_to_rank(warnings, "filters", fresh=lambda filters: [*filters])
belongs_to_rank(warnings, "showwarning", "_showwarnmsg_impl", fresh=lambda shown: shown)


class OwnState:
    """One rank's, or the process's own before and after a run."""

    def __init__(self, own: OwnModules, values: list[Any], belonging: list[Any]) -> None:
        self._own = own
        self._modules: dict[str, ModuleType] = {}
        self._values = values
        self._switches = [get() for get, _ in _SWITCHES]
        self._dtype = torch.get_default_dtype()
        self._belonging = belonging

    @staticmethod
    def now(own: OwnModules) -> "OwnState":
        """As it is in this process."""
        found = OwnState(own, [get() for get, _ in _VALUES], [one.value for one in belongings()])
        found._modules = own.here()
        return found

    @staticmethod
    def fresh(rank: int, own: OwnModules) -> "OwnState":
        """As a process has it that has just started. What others draw from the system is seeded."""
        values = [torch.Generator().get_state(), random.Random(rank).getstate(), np.random.MT19937(rank)]
        return OwnState(own, values, [one.fresh(one.value) for one in belongings()])

    def take(self) -> None:
        """Put all of it in its place."""
        self._own.put(self._modules)
        for (_, put), value in zip(_VALUES, self._values, strict=True):
            put(value)
        for (get, put), value in zip(_SWITCHES, self._switches, strict=True):
            if get() != value:
                put(value)
        if torch.get_default_dtype() is not self._dtype:
            torch.set_default_dtype(self._dtype)
        known = belongings()
        for one, value in zip(known, self._belonging, strict=False):
            if one.within[one.name] is not value:  # few are another rank's own: as cheap as can be
                one.put(value)
        for one in known[len(self._belonging) :]:  # named since, by what another rank has imported
            one.put(one.fresh(one.first))

    def leave(self) -> None:
        """Keep all of it as it is now."""
        self._modules = self._own.here()
        self._values = [get() for get, _ in _VALUES]
        self._switches = [get() for get, _ in _SWITCHES]
        self._dtype = torch.get_default_dtype()
        self._belonging = [one.within[one.name] for one in belongings()]

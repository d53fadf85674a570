"""Generators of random numbers: those of devices, and others, which a module may have; their states."""

import pickle
import random
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import Tensor, nn

Generator = Any  # of torch, Python or numpy, or a keeper of several states, such as Megatron's tracker
OF_ONE_STATE = (torch.Generator, random.Random, numpy.random.Generator, numpy.random.RandomState)


@dataclass(frozen=True)
class GeneratorState:
    """A generator, and the state that it had."""

    generator: Generator
    state: Any

    @staticmethod
    def of(generator: Generator) -> "GeneratorState":
        """It as it is now."""
        if isinstance(generator, torch.Generator | numpy.random.RandomState):
            return GeneratorState(generator, generator.get_state())
        if isinstance(generator, random.Random):
            return GeneratorState(generator, generator.getstate())
        if isinstance(generator, numpy.random.Generator):
            return GeneratorState(generator, generator.bit_generator.state)
        return GeneratorState(generator, {name: _kept(state) for name, state in generator.get_states().items()})

    def put_back(self) -> None:
        """The generator has that state again."""
        if isinstance(self.generator, torch.Generator | numpy.random.RandomState):
            self.generator.set_state(self.state)
        elif isinstance(self.generator, random.Random):
            self.generator.setstate(self.state)
        elif isinstance(self.generator, numpy.random.Generator):
            self.generator.bit_generator.state = self.state
        else:
            self.generator.set_states({name: _as_given(state) for name, state in self.state.items()})

    @property
    def content(self) -> bytes:
        """The state, to be compared."""
        return content(self.state)

    @property
    def moved(self) -> bool:
        """Whether the generator has another state now."""
        return self.content != GeneratorState.of(self.generator).content


def states_on(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """The state of each device's random numbers."""
    return {device: _random(device).get_rng_state(*_at(device)) for device in devices}


def set_states_on(states: Mapping[torch.device, Tensor]) -> None:
    """Each device draws on from this state."""
    for device, state in states.items():
        _random(device).set_rng_state(state, *_at(device))


def content(state: Any) -> bytes:
    """A state, to be compared."""
    return pickle.dumps(_plain(state))


def is_generator(one: object) -> bool:
    """Whether random numbers come from ``one``, whose state can be taken: a keeper has get_states and set_states."""
    if isinstance(one, OF_ONE_STATE):
        return not isinstance(one, random.SystemRandom)
    return not isinstance(one, type) and all(
        callable(getattr(one, name, None)) for name in ("get_states", "set_states")
    )


def generators_in(module: nn.Module) -> list[Generator]:
    """Those that the modules in it have as members, each once."""
    members = (one for part in module.modules() for one in vars(part).values())
    return list({id(one): one for one in members if is_generator(one)}.values())


def own_generators(devices: Iterable[torch.device]) -> Iterator[Generator]:
    """Python's, numpy's, and torch's own on ``devices``."""
    yield from (random.random.__self__, numpy.random.random.__self__, torch.default_generator)  # type: ignore[attr-defined]
    for device in devices:
        if device.type != "cpu" and has_generators(device):
            yield from torch.get_device_module(device).default_generators


def has_generators(device: torch.device) -> bool:
    """Whether ``device`` has generators of its own."""
    return device.type == "cpu" or hasattr(torch.get_device_module(device), "default_generators")


def _random(device: torch.device) -> Any:
    """Who has the random numbers of ``device``."""
    return torch if device.type == "cpu" else torch.get_device_module(device)


def _at(device: torch.device) -> tuple[torch.device, ...]:
    return () if device.type == "cpu" else (device,)


def _kept(state: Any) -> Any:
    """A copy of one of a keeper's states: it may be a generator, which moves on."""
    if isinstance(state, torch.Generator):
        return GeneratorState.of(state)
    return state.clone() if isinstance(state, Tensor) else state


def _as_given(state: Any) -> Any:
    """What a keeper is given back for a copy that was made so."""
    if isinstance(state, GeneratorState):
        state.put_back()
        return state.generator
    return _kept(state)


def _plain(state: Any) -> Any:
    if isinstance(state, GeneratorState):
        return _plain(state.state)
    if isinstance(state, Mapping):
        return {name: _plain(one) for name, one in state.items()}
    return state.cpu().numpy().tobytes() if isinstance(state, Tensor) else state

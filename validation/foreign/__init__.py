"""Judging a training step that is not ours: it runs on real ranks beside the reference and hands back what it made."""

from pipeproof.foreign.handed_back import FlatShard as FlatShard
from pipeproof.foreign.handed_back import HandedBack as HandedBack
from pipeproof.foreign.layerwise import Window as Window
from pipeproof.foreign.mutate import LetPass as LetPass
from pipeproof.foreign.mutate import Mutated as Mutated
from pipeproof.foreign.mutate import under_test as under_test
from pipeproof.foreign.on_a_world import layerwise as layerwise
from pipeproof.foreign.on_a_world import mutate as mutate
from pipeproof.foreign.on_a_world import validate as validate
from pipeproof.foreign.operations import Operation as Operation
from pipeproof.foreign.validator import WhiteBox as WhiteBox
from pipeproof.observers.watching import watch as watch

__all__ = [
    "FlatShard",
    "HandedBack",
    "LetPass",
    "Mutated",
    "Operation",
    "WhiteBox",
    "Window",
    "layerwise",
    "mutate",
    "under_test",
    "validate",
    "watch",
]

"""Judging a training step that is not ours: it runs on real ranks beside the reference and hands back what it made."""

from pipeproof.foreign.handed_back import FlatShard as FlatShard
from pipeproof.foreign.handed_back import HandedBack as HandedBack
from pipeproof.foreign.layerwise import Window as Window
from pipeproof.foreign.validator import WhiteBox as WhiteBox
from pipeproof.foreign.validator import layerwise as layerwise
from pipeproof.foreign.validator import validate as validate
from pipeproof.observers.watching import watch as watch

__all__ = ["FlatShard", "HandedBack", "WhiteBox", "Window", "layerwise", "validate", "watch"]

"""Judging a training step that is not ours: it runs on real ranks beside the reference and hands back what it made."""

from validation.foreign.handed_back import FlatShard as FlatShard
from validation.foreign.handed_back import HandedBack as HandedBack
from validation.foreign.validator import WhiteBox as WhiteBox
from validation.foreign.validator import validate as validate
from validation.observers.watching import watch as watch

__all__ = ["FlatShard", "HandedBack", "WhiteBox", "validate", "watch"]

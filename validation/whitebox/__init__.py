"""Judging a training step that is not ours: it runs on real ranks beside the reference and hands back what it made."""

from validation.whitebox.handed import FlatShard as FlatShard
from validation.whitebox.handed import HandedBack as HandedBack
from validation.whitebox.validator import WhiteBox as WhiteBox
from validation.whitebox.validator import validate as validate
from validation.whitebox.watching import watch as watch

__all__ = ["FlatShard", "HandedBack", "WhiteBox", "validate", "watch"]

"""Observers: they watch a step without disturbing it."""

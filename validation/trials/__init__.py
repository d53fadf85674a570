"""Planted faults tried out: caught, named, located, and shrunk to their smallest case."""

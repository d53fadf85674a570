"""Layouts of a whole job over its devices: what they hold, how long a step takes, which to choose."""

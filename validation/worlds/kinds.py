"""What a world can be, by name: a command line and pytest's options know this before anything else is imported."""

REAL, SIMULATED = KINDS = ("real", "simulated")

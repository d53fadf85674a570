"""From what disagrees to the fault that explains it."""

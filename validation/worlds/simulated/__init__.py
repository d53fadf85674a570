"""All ranks in one process: threads of which exactly one runs, and a network that a seed decides about."""

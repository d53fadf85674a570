"""Cases of frameworks' own engines: layouts of a tiny model, the model and a step of it, and known faults."""

"""Cases: runs on our own runtime and torch's, with planted faults."""

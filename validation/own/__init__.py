"""Cases of our own runtime, and of torch's: what they are, how they run, and the faults planted in them."""

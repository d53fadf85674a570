"""What passes: the contract of a step, the judge, and every threshold of it."""

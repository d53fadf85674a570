"""What passes: the contract of a step, the judge, and its thresholds."""

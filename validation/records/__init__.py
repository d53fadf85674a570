"""Records of steps, expected and observed, as files, and their comparison."""

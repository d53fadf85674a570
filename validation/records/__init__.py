"""What was expected of steps and what a run gave, kept in files and held against each other."""

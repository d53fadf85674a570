"""Training steps that public frameworks run: one file for each says where their numbers are, and nothing else."""

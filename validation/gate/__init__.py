"""The gate of a merge: what it runs, what follows, and how others read it."""

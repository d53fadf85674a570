"""What sees a step without disturbing it."""

"""Single-device models and a plain training loop: the standard for every schedule."""

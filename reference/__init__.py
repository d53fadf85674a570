"""Single-device models and a plain training loop: what every schedule is compared with."""

"""How far the smallest faults lie above rounding."""

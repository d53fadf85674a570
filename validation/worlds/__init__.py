"""Worlds: processes, torchrun, pytest sessions over ranks; rank reports and stalls."""

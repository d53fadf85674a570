"""Verdicts as pages: one HTML file each, without network access."""

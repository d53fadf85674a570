"""Rules of explanation: one link of a gradient's way each, and how it broke."""

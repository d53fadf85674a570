"""Rules of explanation: each looks at one link of the way that a gradient takes, and says how it broke."""

"""Tables of specimens by topic. Their code imitates a user's."""

"""Tables of specimens by what they are about. Their code plays the part of a user's own."""

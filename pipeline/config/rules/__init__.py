"""Validation of a run: which layouts and features go together, what is refused, and with which remedy."""

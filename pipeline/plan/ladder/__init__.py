"""Scaling ladders: small runs on the user's own data predict the loss of the large one, before it is paid for."""

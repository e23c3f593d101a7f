"""Search for the fastest layout that fits in memory (`headrace plan --search`)."""

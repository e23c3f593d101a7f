"""What a run needs and takes before it starts: `headrace plan`; goodput under failures over weeks."""

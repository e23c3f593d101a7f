"""What a run needs and takes before it starts: `headrace plan`."""

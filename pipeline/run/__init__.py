"""One training run: session (its life), trainer (the loop), prepare, resume, pre-flight, loss spikes, out of memory."""

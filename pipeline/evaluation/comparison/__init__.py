"""Models side by side: size, held-out loss, KL to the first, generation, samples, each by a program that serves it."""

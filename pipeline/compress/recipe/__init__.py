"""The whole compression in one command: prune, distil, quantize, evaluate."""

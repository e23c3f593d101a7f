"""Machines: peak FLOP/s, memory, links, and the share of them that training reaches; no torch."""

"""Timelines of a simulated step: SVG and HTML drawings, Chrome traces."""

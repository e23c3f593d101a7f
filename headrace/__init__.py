"""The ground floor: errors, config files and finished directories. Knows no stage, no torch, no numpy."""

__version__ = "0.1.0"

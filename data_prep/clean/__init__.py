"""Cleaning: quality filters (Gopher, C4, FineWeb), language, PII, blocklists, decontamination, repair of mojibake."""

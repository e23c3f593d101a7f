"""Deduplication: exact and near duplicates (MinHash signatures, LSH bands, connected components), repeated lines."""

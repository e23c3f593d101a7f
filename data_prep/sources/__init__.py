"""Readers of input: JSON lines and arrays, Parquet, text, Hugging Face datasets; gzip, zstd; local files and URLs."""

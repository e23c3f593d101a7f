"""Schema of the corpus config: sources, cleaning, deduplication, BOS and EOS."""

"""Data prep: raw text to tokens, as MapReduce tasks: clean, deduplicate, tokenize, shuffle, shard, pack."""

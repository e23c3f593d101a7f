"""Map and reduce tasks: read, clean, tokenize, sort, merge, shuffle and write shards."""

"""Data prep: raw text to tokens, as MapReduce tasks: clean, deduplicate, tokenize, shuffle, shard, pack."""

from headrace.base.renamed_modules import name_moved_modules

name_moved_modules()

"""Tokenizers: trained BPE and sentencepiece or existing ones, fast engines with verified ids, fingerprints."""

"""Tokenizers: trained BPE and sentencepiece or existing ones, fast engines and the proof of equal ids, fingerprints."""

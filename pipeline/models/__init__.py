"""Hugging Face models: architectures on meta, initial values, attention, parameter and FLOP counts, folders, GGUF."""

"""GGUF files, which llama.cpp and what is built on it read: written from Hugging Face folders, and checked."""

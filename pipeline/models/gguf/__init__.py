"""GGUF files, which llama.cpp and programs built on it read: written from Hugging Face folders, and checked."""

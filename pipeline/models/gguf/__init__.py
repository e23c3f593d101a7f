"""Writes GGUF files, for llama.cpp and programs built on it, from Hugging Face folders, and checks them."""

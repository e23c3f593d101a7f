"""Programs that serve a model (transformers, vLLM, llama.cpp), run to measure the loss of quality by a compression."""

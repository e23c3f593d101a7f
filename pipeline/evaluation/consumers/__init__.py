"""Programs that serve a model (transformers, vLLM, llama.cpp), run to measure what a compression has cost."""

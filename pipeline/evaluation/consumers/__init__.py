"""Programs that serve a model (transformers, vLLM, llama.cpp), run to measure the quality that a compression loses."""

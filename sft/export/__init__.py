"""Exports a trained model: merged, vLLM, Ollama and GGUF, hub."""

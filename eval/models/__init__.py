"""The models that answer: transformers, vLLM, a server, or the model in training."""

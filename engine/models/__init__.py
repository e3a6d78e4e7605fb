"""Models as they lie on disk and in memory: config, safetensors, Llama weights, conversion from GGUF."""

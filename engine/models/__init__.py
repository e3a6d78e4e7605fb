"""Models as they lie on disk and in memory: families, config, safetensors, the forward pass, conversion from GGUF."""

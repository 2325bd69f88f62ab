"""The folder that vLLM's Python has on its path, with one module: Footplate itself is not importable there."""

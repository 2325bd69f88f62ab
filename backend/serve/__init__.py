"""The process that serves a GGUF file of a run with llama.cpp's server: a job of the run (backend/models/serve.py)."""

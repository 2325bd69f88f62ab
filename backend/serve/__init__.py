"""The process that serves a model of a run, with llama.cpp's server or with vLLM: a job of the run
(backend/models/serve.py)."""

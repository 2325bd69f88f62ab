"""Models that runs have trained: where they are, what they are, and which base model they belong to.

`trained.py` describes the model in a folder; `fingerprint.py` tells whether weights are those of training. No torch:
programs that load a model are in `backend/inference` and `backend/export`.
"""

"""Models that runs have trained: where they are, what they are, which base model they belong to, and what is done with
them: chatting, evaluating, merging, exporting. Publishing is in `backend/publish`.

`trained.py` describes the model in a folder; `fingerprint.py` tells whether weights are those of training. No torch:
the processes, which load a model, are in `backend/inference` and `backend/export`.
"""

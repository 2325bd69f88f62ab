"""Everything but the page. Start reading at `spec/`, then `plan.py`, then `run/`.

Three sentences to remember: webui uses backend, never back. Planning is pure, running is the standard
library, training is heavy, and they meet only on disk. Nothing but `backend/train` imports torch.
"""

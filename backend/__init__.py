"""Everything but the page. Start reading at `config/`, then `launch/plan.py`, then `runs/`. webui imports backend,
never the other way round. `launch` computes plans and reads no state, `runs` needs only the standard library, `train`
needs the heavy libraries, and they exchange data only through files. Nothing but `backend/train` imports torch.
"""

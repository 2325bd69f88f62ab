"""The training process: `python -m backend.train FOLDER` trains FOLDER/spec.yaml. The only package with torch.

Imported by nobody. `__main__` reads the plan and runs the rules (`verify`), `training` goes through the phases:
`model`, `adapters`, `lora`, `quantized` (the weights), `data`, `preference_data`, `templates` (the examples),
`engines` (the strategy), `trainers`, `trl_trainers`, `optimizers` (the Trainer), `callbacks`, `checkpoints`,
`generation_eval` (during training), `run_log` (what is reported). `patches` has work-arounds of library defects.
"""

import logging

# On every CPU bitsandbytes advertises an optional package as soon as peft imports it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

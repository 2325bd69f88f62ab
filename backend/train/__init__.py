"""The training process: `python -m backend.train FOLDER` trains FOLDER/spec.yaml. The only package with torch.

Imported by nobody. `__main__` reads the plan and runs the rules (`verify`), `training` goes through the phases:
`model`, `adapters`, `lora`, `quantized` (the weights), `data`, `preference_data`, `templates`, `encoding` (the
examples), `engines` (the strategy), `trainers`, `trl_trainers`, `optimizers` (the Trainer), `callbacks`,
`checkpoints`, `generation_eval` (during training), `run_log` (what is reported). `patches` has
work-arounds of library defects.
"""

import logging

# Every run would begin with what these libraries write when they are imported, and no user can change it: bitsandbytes
# advertises an optional package, torchao has kernels for other devices, and calls a deprecated function of torch.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
logging.getLogger("torchao").addFilter(lambda record: not str(record.msg).startswith("Failed to load "))
logging.getLogger("torch.utils._pytree").addFilter(lambda record: "is an Enum subclass" not in str(record.msg))

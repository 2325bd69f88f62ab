"""What torchrun runs: `python -m backend.train FOLDER` trains what FOLDER/spec.yaml says. The only home of torch.

Beside the floors. Imports spec, options, catalog, paths, presets, rows and run's names; imported by nobody.
__main__ is the whole way on one screen; device (where), model and builtin (what is trained), data and labels (from
what), trainers (how), callbacks and checkpoints (what happens on the way), answers (before and after), journal
(what is told); adapters, lora and quantized (which weights, and how they are held).
"""

import logging

# bitsandbytes says on every CPU that an optional package would make it quicker, as soon as peft looks at it.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)

"""What torchrun runs: `python -m backend.train FOLDER` trains what FOLDER/spec.yaml says. The only home of torch.

Beside the floors. Imports spec, options, catalog, paths, presets, rows and run's names; imported by nobody.
__main__ is the whole way on one screen; device (where), model and builtin (what is trained), data and labels (from
what), trainers (how), callbacks and checkpoints (what happens on the way), answers (before and after), journal
(what is told).
"""

"""Evaluation, checkpoints and logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    EVALUATING,
    GENERATING,
    LORA,
    SAVING,
    Section,
    Ui,
    one_of,
)


class Eval(Section):
    """What is looked at beside the loss."""

    strategy: Annotated[Literal["no", "steps", "epoch"], Ui("Evaluate")] = "epoch"
    """The loss on validation rows, drawn beside the training loss."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"eval.strategy": ("steps",)}, unit="steps")] = 50
    """Steps between evaluations."""
    per_device_eval_batch_size: Annotated[int, Field(ge=1, le=65536), Ui("Batch size", when=EVALUATING)] = 8
    """Rows a device evaluates at once."""
    num_generations: Annotated[int, Field(ge=0, le=10_000), Ui("Answers before and after", when=GENERATING)] = 0
    """Validation rows answered by the model before and after training and compared with what was wanted; 0 is off."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768), Ui("Longest answer", when=GENERATING, unit="tokens")] = 128
    """Where an answer is cut."""


class Save(Section):
    """What is kept on the way, and at the end."""

    strategy: Annotated[Literal["no", "steps", "epoch"], Ui("Save checkpoints")] = "epoch"
    """A stopped or failed run goes on from the last complete one."""
    steps: Annotated[int, Field(ge=1), Ui("Every", when={"save.strategy": ("steps",)}, unit="steps")] = 100
    """Steps between checkpoints."""
    total_limit: Annotated[int, Field(ge=0), Ui("Keep", when=SAVING)] = 2
    """Older checkpoints are deleted; 0 keeps all."""
    only_model: Annotated[bool, Ui("Weights only", when=SAVING)] = False
    """Smaller, but such a checkpoint cannot be resumed from."""
    load_best_model_at_end: Annotated[bool, Ui("End with the best", when={**SAVING, **EVALUATING})] = False
    """Load the checkpoint with the lowest validation loss at the end."""
    resume_from: Annotated[Literal["latest", "scratch", "path"], Ui("Start from")] = "latest"
    """Started again, a run continues from its last complete checkpoint, begins anew, or takes one that you name."""
    resume_path: Annotated[str, Ui("Checkpoint folder", when={"save.resume_from": ("path",)})] = ""
    """A checkpoint-N folder of a run with the same model and method; the number of processes may be another."""
    final_model: Annotated[bool, Ui("Save the trained model")] = True
    """In the run's folder under model/, as `from_pretrained` loads it."""
    merge_adapter: Annotated[bool, Ui("Merge the adapter", when={**LORA, "save.final_model": ("true",)})] = False
    """Save whole weights with the adapter added in, instead of the adapter alone."""


class Logging(Section):
    """What is written down while it runs."""

    run_name: Annotated[str, Field(max_length=80), Ui("Run name")] = ""
    """Part of the folder's name; empty takes model and method."""
    steps: Annotated[int, Field(ge=1), Ui("Log every", unit="steps")] = 1
    """Steps between points of the curves."""
    level: Annotated[Literal["info", "warning", "error"], Ui("Log level")] = "warning"
    """How much the libraries say in the log."""
    report_to: Annotated[str, *one_of(registry.REPORTERS), Ui("Also report to")] = "none"
    """A tracker that you use already."""

"""Evaluation, checkpoints and logging."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from backend import registry
from backend.config.fields import (
    EVALUATING,
    GENERATING,
    LORA,
    NO,
    SAVING,
    Section,
    Ui,
    one_of,
)

NAME_LENGTH = 80  # characters of a run's name, which is a part of its folder's name


class Eval(Section):
    """Evaluation during the run."""

    strategy: Annotated[Literal["no", "steps", "epoch"], NO, Ui("Evaluation strategy")] = "epoch"
    """When the eval loss on the validation set is computed; every N steps suits long epochs."""
    steps: Annotated[int, Field(ge=1), Ui("Evaluation interval", when={"eval.strategy": ("steps",)}, unit="steps")] = 50
    """Optimizer steps between evaluations; 50 to 500 is usual."""
    per_device_eval_batch_size: Annotated[
        int, Field(ge=1, le=65536), Ui("Eval batch size per device", when=(EVALUATING, GENERATING))
    ] = 8
    """Examples per forward pass, and prompts per generated batch, on each device; lower it if evaluation or generation
    runs out of memory. 8 is usual. It does not change the validation loss of SFT and pretraining, which is the mean
    over all tokens with a loss. It may change that of preference stages, for which TRL computes a mean over batches."""
    early_stopping_patience: Annotated[
        int, Field(ge=0, le=10_000), Ui("Early stopping patience", when=EVALUATING, unit="evaluations")
    ] = 0
    """Ends training after this many evaluations in a row without a lower eval loss; 3 to 5 is usual, and 0 turns it
    off."""
    early_stopping_threshold: Annotated[float, Field(ge=0, le=100), Ui("Early stopping threshold", when=EVALUATING)] = (
        0.0
    )
    """How much lower the eval loss must be to count as an improvement for early stopping; usually 0."""
    num_generations: Annotated[int, Field(ge=0, le=10_000), Ui("Generations to evaluate", when=GENERATING)] = 0
    """Validation prompts that the model completes before and after training, scored against the expected text; 0
    disables it."""
    generate_during_eval: Annotated[bool, Ui("Generate at each evaluation", when={**EVALUATING, **GENERATING})] = False
    """Also generates outputs for the validation prompts of eval.num_generations at each evaluation, to show how they
    change during training; each time takes as long as the generation before training. Usually off."""
    max_new_tokens: Annotated[int, Field(ge=1, le=32_768), Ui("Max new tokens", when=GENERATING)] = 128
    """Length limit of each evaluated generation; 128 to 512 is usual."""


class Save(Section):
    """Checkpoints and the final model."""

    strategy: Annotated[Literal["no", "steps", "epoch"], NO, Ui("Save strategy")] = "epoch"
    """When checkpoints are saved; a stopped or failed run resumes from the last complete one."""
    steps: Annotated[int, Field(ge=1), Ui("Save interval", when={"save.strategy": ("steps",)}, unit="steps")] = 100
    """Optimizer steps between checkpoints; 100 to 1000 is usual."""
    total_limit: Annotated[int, Field(ge=0), Ui("Checkpoint limit", when=SAVING)] = 2
    """Number of checkpoints to keep; 0 keeps all. One takes 12 to 16 bytes per parameter in full fine-tuning with
    AdamW, and about half of that with pure bf16."""
    keep_best: Annotated[int, Field(ge=0, le=1000), Ui("Best checkpoints to keep", when={**SAVING, **EVALUATING})] = 0
    """Number of checkpoints with the lowest eval loss to keep, in addition to the newest ones that save.total_limit
    keeps; 0 turns this off. Checkpoints at steps without an evaluation do not count."""
    only_model: Annotated[bool, Ui("Save only the model", when=SAVING)] = False
    """Saves checkpoints without optimizer state: smaller, but a run cannot resume from them. Usually off."""
    load_best_model_at_end: Annotated[bool, Ui("Load best model at end", when={**SAVING, **EVALUATING})] = False
    """Loads the checkpoint with the lowest eval loss before the final model is saved."""
    resume_from: Annotated[Literal["latest", "scratch", "path"], Ui("Resume from")] = "latest"
    """What a restarted run does: continue from the latest checkpoint, start from scratch, or resume from a checkpoint
    folder."""
    resume_path: Annotated[str, Ui("Checkpoint folder", when={"save.resume_from": ("path",)}, path="folder")] = ""
    """A checkpoint-N folder of a run with the same model and method; with most strategies, the number of processes may
    differ."""
    stop_timeout: Annotated[int, Field(ge=1, le=604_800), Ui("Stop timeout", unit="s")] = 1800
    """How long Stop waits for the step, the evaluation and the checkpoint before the processes are ended; 1800 is
    usual, more for large models on slow storage."""
    final_model: Annotated[bool, Ui("Save final model")] = True
    """Saves the trained model or adapter in the folder model/ of the run, ready for from_pretrained."""
    merge_adapter: Annotated[bool, Ui("Merge adapter", when={**LORA, "save.final_model": ("true",)})] = False
    """Saves the full model with the adapter merged into it, instead of only the adapter."""

    @property
    def can_resume(self) -> bool:
        """Whether there are checkpoints with the optimizer state, from which a run can resume."""
        return self.strategy != "no" and not self.only_model


class Logging(Section):
    """Run name, log and experiment tracker."""

    run_name: Annotated[str, Field(max_length=NAME_LENGTH), Ui("Run name")] = ""
    """Part of the run folder's name; empty uses the model and the method."""
    steps: Annotated[int, Field(ge=1), Ui("Logging interval", unit="steps")] = 1
    """Optimizer steps between logged metrics; 1 to 10 is usual."""
    level: Annotated[Literal["info", "warning", "error"], Ui("Log level")] = "warning"
    """Log level of transformers, accelerate, peft and the other libraries; warning is usual."""
    report_to: Annotated[str, *one_of(registry.REPORTERS), Ui("Report to")] = "none"
    """Experiment tracker that receives the metrics, in addition to the run's page."""

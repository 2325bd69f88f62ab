"""Rules about the optimizer state in checkpoints: what can be saved, and loaded when a run resumes."""

from __future__ import annotations

from backend.rules.base import Case, Example, Fix, error, warning
from backend.rules.common_fixes import ADAMW
from backend.rules.examples import EQUIPPED, EQUIPPED_TWO, full_spec


@error(
    "OPT028",
    fields=("train.optim", "save.strategy", "save.only_model", "parallel.state_dict_type"),
    title="FSDP2 cannot save the state of this optimizer",
    source="verified with torch 2.13 distributed/checkpoint: it saves tensors and numbers only, and refuses the "
    "projectors of galore-torch 1.0; grokadamw 0.1.2 keeps its state under the parameters themselves, which a sharded "
    "checkpoint refuses",
    fixes=(
        Fix("Save weights only", {"save.only_model": True, "parallel.state_dict_type": "full"}, cost="no resume"),
        ADAMW,
    ),
    fails_on=Example(full_spec("galore_adamw", parallel__strategy="fsdp2", save__strategy="steps"), EQUIPPED_TWO),
    passes_on=Example(
        full_spec("galore_adamw", parallel__strategy="fsdp2", save__strategy="steps", save__only_model=True),
        EQUIPPED_TWO,
    ),
    proof="launch",
)
def optimizer_state_not_saved_by_fsdp2(case: Case) -> str | None:
    """A checkpoint that can be resumed has the optimizer state. FSDP2 saves it through torch's distributed checkpoint,
    which supports tensors and numbers under the names of parameters, and nothing else."""
    row = case.optimizer
    if case.run.fsdp_version != 2 or not case.spec.save.can_resume:
        return None
    if row.steps_in_backward or row.needs_plain_tensors(case.run.fp32_master_weights):  # other rules refuse these
        return None
    if row.is_saved_by_fsdp2(sharded=case.run.checkpoint_format == "sharded"):
        return None
    return f"The first checkpoint would fail: FSDP2 cannot save the state of {row.label}."


@error(
    "OPT031",
    fields=("train.optim", "parallel.state_dict_type", "save.strategy", "save.only_model"),
    title="FSDP2 cannot resume this optimizer from full checkpoints",
    source="verified with torch 2.13 distributed/checkpoint: torch.load refuses the gathered state of torchao 0.18, "
    "and Adam-mini fails in the first step after loading its own state",
    fixes=(
        Fix("Save sharded checkpoints", {"parallel.state_dict_type": "sharded"}),
        Fix("Save weights only", {"save.only_model": True}, cost="no resume"),
        ADAMW,
    ),
    fails_on=Example(full_spec("adamw_torch_8bit", parallel__strategy="fsdp2", save__strategy="steps"), EQUIPPED_TWO),
    passes_on=Example(
        full_spec(
            "adamw_torch_8bit", parallel__strategy="fsdp2", save__strategy="steps", parallel__state_dict_type="sharded"
        ),
        EQUIPPED_TWO,
    ),
)
def optimizer_state_not_loaded_by_fsdp2(case: Case) -> str | None:
    """A full checkpoint has the optimizer state of all ranks, gathered on rank 0. When the run resumes, the ranks
    divide it again, which fails for this optimizer. In a sharded checkpoint each rank saves and loads its own part."""
    row = case.optimizer
    if case.run.fsdp_version != 2 or not case.spec.save.can_resume or not row.needs_sharded_state:
        return None
    if row.needs_plain_tensors(case.run.fp32_master_weights) or case.run.checkpoint_format == "sharded":
        return None
    return f"The run could not resume: {row.label} does not load from full checkpoints."


@warning(
    "OPT016",
    fields=("train.optim", "save.strategy"),
    title="The optimizer state cannot be resumed",
    source="grokadamw 0.1.2: its moments are stored under the parameter objects of the stopped process; lomo-optim "
    "0.1.1 adalomo.py keeps them outside the optimizer state",
    fixes=(ADAMW,),
    fails_on=Example({"train.optim": "grokadamw"}, EQUIPPED),
    passes_on=Example({"train.optim": "adamw_torch"}, EQUIPPED),
)
def optimizer_state_not_resumable(case: Case) -> str | None:
    """The optimizer's moments are missing in the checkpoint or cannot be assigned to the parameters of the resumed run.
    The resumed run starts with empty moments and takes steps that differ from those of an uninterrupted run."""
    row = case.optimizer
    return f"{row.label} cannot restore its moments from a checkpoint." if row.loses_state_on_save else None

"""What was refused once and works now: people come with these, and no rule here speaks of them any more.

Floor 3. Imports: nothing. `seen` is where it was seen to work or read; earlier versions may do it too. `test` is a
launch that proves it here: a file of tests/process and a test in it; '' where nothing was launched.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outdated:
    """One old belief: about what, what was said, what holds now, and how that is known."""

    pair: str
    belief: str
    now: str
    seen: str
    test: str = ""


OUTDATED = (
    Outdated(
        "PiSSA with ZeRO-3",
        "The start needs whole weights, and each rank has a part of them.",
        "PEFT gathers a layer while it takes its start out of it, for PiSSA and OLoRA alike.",
        "peft 0.21",
        "test_methods.py::test_zero3_saves_the_same",
    ),
    Outdated(
        "predict_with_generate with ZeRO-3 or FSDP",
        "Ranks that end their answers at different lengths wait for one another without end.",
        "Weights are gathered for the answers and spread again; answers and losses are those of one process.",
        "deepspeed 0.19, torch 2.13",
        "test_strategies.py::test_answers_are_those_of_one_process",
    ),
    Outdated(
        "4 bits of bitsandbytes with ZeRO-3 or FSDP2",
        "QLoRA is for DDP and FSDP1 alone, or stays whole on each device.",
        "Stored as floating-point numbers the packed weights are spread: each device holds its part.",
        "bitsandbytes 0.50, transformers 5.23",
        "test_quantized.py::test_strategies_learn_the_same",
    ),
    Outdated(
        "bitsandbytes without CUDA",
        "4 and 8 bits need an NVIDIA GPU.",
        "A CPU packs, computes and learns with them, slowly.",
        "bitsandbytes 0.50",
        "test_quantized.py::test_it_learns_as_on_plain_weights",
    ),
    Outdated(
        "GaLore with FSDP",
        "Its projections need whole matrices, which FSDP cuts into flat parts.",
        "FSDP2 keeps matrices as they are. FSDP1 and ZeRO do cut them: there a rule refuses it.",
        "torch 2.13, galore-torch 1.0",
        "test_matrix.py::test_what_passes_the_checks_runs",
    ),
    Outdated(
        "Layer-wise GaLore",
        "It was removed from transformers.",
        "It is there, for one process and without accumulation, which rules say.",
        "transformers 5.23",
        "test_optimizers.py::test_it_trains_and_weighs",
    ),
    Outdated(
        "Packing without FlashAttention",
        "Rows that are packed together see each other in any other attention.",
        "SDPA and eager attention keep them apart by their positions; long packed rows are slower there.",
        "transformers 5.23, trl 1.16",
        "test_methods.py::test_attentions_learn_the_same",
    ),
    Outdated(
        "FSDP without a GPU",
        "FSDP is for accelerators.",
        "FSDP2 runs on a CPU with the losses of one process. FSDP1 does not: a rule says so.",
        "torch 2.13, accelerate 1.15",
        "test_strategies.py::test_the_losses_are_those_of_one_process",
    ),
    Outdated(
        "A sharded FSDP checkpoint on other devices",
        "A run goes on with as many processes as wrote its checkpoint.",
        "The parts are dealt out anew for any number.",
        "torch 2.13",
        "test_strategies.py::test_fsdp_goes_on_with_another_number_of_processes",
    ),
    Outdated(
        "A DeepSpeed checkpoint on other devices",
        "A run goes on with as many processes as wrote its checkpoint.",
        "It is converted into a universal one at the start, with AdamW's moments.",
        "deepspeed 0.19",
        "test_strategies.py::test_deepspeed_goes_on_with_another_number_of_processes",
    ),
    Outdated(
        "Fine-tuning a model that came in FP8",
        "Weights of 8 bits take no gradients.",
        "They are unpacked while they are loaded, and learn as plain ones do, whole or with adapters.",
        "transformers 5.23",
        "test_quantized.py::test_fp8_is_unpacked_and_learns",
    ),
    Outdated(
        "Sharded checkpoints with the best one at the end",
        "load_best_model_at_end needs a checkpoint in one file.",
        "Only weights alone cannot be loaded back: a rule refuses that pair, and no other.",
        "transformers 5.23 trainer.py",
    ),
    Outdated(
        "Activation checkpointing with ZeRO-3 and adapters",
        "use_reentrant must be set by hand.",
        "The trainer's own default is right for every strategy.",
        "deepspeed 0.19, transformers 5.23 modeling_utils.py",
    ),
)

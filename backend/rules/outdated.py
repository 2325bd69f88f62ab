"""Outdated advice: combinations that failed with earlier versions and work now, which no rule rejects any more."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Outdated:
    """One piece of outdated advice.

    `verified_with`: the versions with which it was launched or read; earlier ones may work too. `test`: a test of
    tests/process that launches it, as file::name; '' where nothing was launched.
    """

    topic: str
    before: str
    now: str
    verified_with: str
    test: str = ""

    @property
    def proof(self) -> str:
        """How it was verified."""
        if self.test:
            return f"a test launches it, tests/process/{self.test}"
        return "read in the library's source code, not launched"


OUTDATED = (
    Outdated(
        "PiSSA with ZeRO-3",
        "PiSSA decomposes complete weights, and under ZeRO-3 each rank holds only a shard.",
        "PEFT gathers each layer's weight while it initializes PiSSA or OLoRA from it.",
        "peft 0.21",
        "test_methods.py::test_zero3_saves_the_same_adapter",
    ),
    Outdated(
        "predict_with_generate with ZeRO-3 or FSDP",
        "Ranks whose generations have different lengths wait for each other forever.",
        "Weights are gathered for generation and sharded again afterward; generations and losses match those of one "
        "process.",
        "deepspeed 0.19, torch 2.13",
        "test_strategies.py::test_generations_match_one_process",
    ),
    Outdated(
        "4-bit bitsandbytes with ZeRO-3 or FSDP2",
        "QLoRA works only with DDP and FSDP1; other strategies keep all quantized weights on each device.",
        "With a floating-point bnb_4bit_quant_storage the quantized weights are sharded over the devices.",
        "bitsandbytes 0.50, transformers 5.23",
        "test_quantized.py::test_strategies_match_one_process",
    ),
    Outdated(
        "bitsandbytes without CUDA",
        "4-bit and 8-bit quantization need an NVIDIA GPU.",
        "bitsandbytes also quantizes and trains on a CPU, but slowly.",
        "bitsandbytes 0.50",
        "test_quantized.py::test_losses_are_close_to_unquantized_training",
    ),
    Outdated(
        "GaLore with FSDP",
        "GaLore projects complete gradient matrices, and FSDP flattens them into 1-D shards.",
        "FSDP2 keeps parameters as matrices (DTensor). FSDP1 and ZeRO flatten them, and rules reject GaLore there.",
        "torch 2.13, galore-torch 1.0",
        "test_strategy_matrix.py::test_combinations_that_pass_the_checks_run",
    ),
    Outdated(
        "Layer-wise GaLore",
        "Layer-wise GaLore was removed from transformers.",
        "It is available for one process without gradient accumulation; rules reject the other cases.",
        "transformers 5.23",
        "test_optimizers.py::test_losses_and_state_bytes",
    ),
    Outdated(
        "Packing without FlashAttention",
        "Without FlashAttention, examples that are packed into one sequence attend to each other.",
        "SDPA and eager attention separate them by their position ids, but are slower on long packed sequences.",
        "transformers 5.23, trl 1.16",
        "test_methods.py::test_attention_implementations_give_equal_losses",
    ),
    Outdated(
        "FSDP without a GPU",
        "FSDP needs an accelerator.",
        "FSDP2 runs on CPUs and gives the same losses as one process. FSDP1 does not run there, and a rule rejects it.",
        "torch 2.13, accelerate 1.15",
        "test_strategies.py::test_losses_match_one_process",
    ),
    Outdated(
        "Resuming a sharded FSDP checkpoint with another world size",
        "A run has to resume with as many processes as wrote its checkpoint.",
        "torch's distributed checkpoint reshards it for any number of processes.",
        "torch 2.13",
        "test_strategies.py::test_fsdp_resumes_with_a_different_number_of_processes",
    ),
    Outdated(
        "Resuming a DeepSpeed checkpoint with another world size",
        "A run has to resume with as many processes as wrote its checkpoint.",
        "The checkpoint is converted to a universal checkpoint, including AdamW's moments, when the run resumes.",
        "deepspeed 0.19",
        "test_strategies.py::test_deepspeed_resumes_with_a_different_number_of_processes",
    ),
    Outdated(
        "Fine-tuning an FP8 checkpoint",
        "FP8 weights cannot be trained.",
        "They are dequantized while loading and can then be trained in full or with LoRA.",
        "transformers 5.23",
        "test_quantized.py::test_fp8_checkpoint_is_dequantized_and_trained",
    ),
    Outdated(
        "load_best_model_at_end with sharded checkpoints",
        "load_best_model_at_end needs a checkpoint in one file.",
        "Sharded checkpoints work, except those written with save_only_model, which a rule rejects.",
        "transformers 5.23 trainer.py",
    ),
    Outdated(
        "Activation checkpointing with ZeRO-3 and LoRA",
        "use_reentrant must be set manually.",
        "The Trainer's default works with every strategy.",
        "deepspeed 0.19, transformers 5.23 modeling_utils.py",
    ),
)

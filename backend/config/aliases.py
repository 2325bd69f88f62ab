"""Names that other libraries use for Footplate's options: library name -> option key.

Used by the option search of the page, and for "did you mean" on unknown keys. A name is listed only if it differs from
the second half of the option key, which is found anyway. Read from transformers 5.23 (TrainingArguments,
BitsAndBytesConfig), trl 1.16 (SFTConfig, DPOConfig, KTOConfig, RewardConfig), peft 0.21 (LoraConfig), DeepSpeed 0.19,
accelerate 1.15, torchrun (torch 2.13) and LLaMA-Factory 0.9.
"""

from __future__ import annotations

from collections.abc import Mapping

from backend.registry.llamafactory_names import OPTION_NAMES

# Option -> its names in other libraries, in addition to the names of LLaMA-Factory's options with the same meaning.
NAMES: Mapping[str, str] = {
    "model.hub_id": "model_name_or_path model_name model.name model_id pretrained_model_name_or_path",
    "model.attn_implementation": "flash_attn shift_attn use_flash_attention_2 attention",
    "data.source": "dataset",
    "data.files": "dataset_dir",
    "data.hub_id": "dataset_name",
    "data.hub_config": "dataset_config",
    "data.hub_split": "dataset_train_split",
    "data.text_column": "dataset_text_field",
    "data.validation": "dataset_test_split",
    "data.validation_split": "val_size",
    "data.weight": "interleave_probs probabilities",
    "data.chat_template": "template chat_template_name",
    "data.chat_template_file": "chat_template_path",
    "data.loss_on": "train_on_prompt completion_only_loss assistant_only_loss",
    "data.max_length": "max_seq_length max_prompt_length max_completion_length",
    "data.packing": "neat_packing eval_packing packing_strategy padding_free",
    "data.streaming": "dataset_streaming",
    "data.mixing": "mix_strategy stopping_strategy",
    "method.kind": "finetuning_type use_peft",
    "method.quantization": (
        "quantization_bit quantization_type load_in_4bit load_in_8bit bnb_4bit_quant_type qlora quantization_config"
    ),
    "method.bnb_4bit_use_double_quant": "use_bnb_nested_quant",
    "method.freeze_extra_modules": "freeze_trainable_modules",
    "lora.r": "lora_r rank",
    "lora.target_modules": "lora_target lora_target_modules target_parameters lora_target_parameters",
    "lora.modules_to_save": "additional_target lora_modules_to_save",
    "lora.init": "init_lora_weights pissa_init",
    "lora.loraplus_lr_ratio": "loraplus_lr",
    "train.num_train_epochs": "epochs num_epochs",
    "train.max_steps": "max_train_steps",
    "train.per_device_train_batch_size": (
        "train_micro_batch_size_per_gpu train_batch_size batch_size per_gpu_train_batch_size auto_find_batch_size"
    ),
    "train.gradient_accumulation_steps": "gradient_accumulation",
    "train.learning_rate": "lr",
    "train.lr_scheduler_type": "lr_scheduler scheduler lr_scheduler_kwargs",
    "train.warmup_steps": "warmup_ratio",
    "train.optim": "use_galore use_apollo use_badam optimizer optim_args",
    "train.max_grad_norm": "gradient_clipping",
    "train.projection_rank": "galore_rank apollo_rank",
    "train.update_proj_gap": "galore_update_interval apollo_update_interval",
    "train.optim_target_modules": "galore_target apollo_target",
    "train.badam_switch_block_every": "badam_switch_interval badam_switch_block",
    "train.train_sampling_strategy": "group_by_length",
    "train.activation_checkpointing": (
        "disable_gradient_checkpointing fsdp_activation_checkpointing gradient_checkpointing "
        "gradient_checkpointing_kwargs activation_checkpointing_kwargs"
    ),
    "train.use_liger_kernel": "use_liger liger_kernel_config",
    "train.use_unsloth": "use_unsloth_gc",
    "train.torch_compile": "compile torch_compile_backend torch_compile_mode",
    "train.seed": "data_seed full_determinism",
    "preference.dpo_loss_type": "pref_loss loss_type",
    "preference.label_smoothing": "label_smoothing_factor",
    "preference.sft_loss_weight": "rpo_alpha loss_weights",
    "precision.compute": (
        "pure_bf16 dtype torch_dtype bf16 fp16 tf32 mixed_precision bf16_full_eval fp16_full_eval "
        "bnb_4bit_compute_dtype"
    ),
    "parallel.strategy": (
        "fsdp fsdp_version deepspeed zero_optimization zero_stage zero_optimization.stage zero3_init_flag "
        "parallelism_config"
    ),
    "parallel.bucket_cap_mb": "reduce_bucket_size ddp_bucket_cap_mb",
    "parallel.offload_optimizer": "offload offload_optimizer.device offload_optimizer_device",
    "parallel.offload_param": "offload_param.device offload_param_device",
    "parallel.pin_memory": "offload_optimizer_pin_memory",
    "parallel.nvme_path": "offload_optimizer_nvme_path offload_param_nvme_path",
    "parallel.nvme_buffer_count": "buffer_count",
    "parallel.nvme_buffer_size_mb": "buffer_size",
    "parallel.aio_block_size_kb": "aio block_size",
    "parallel.aio_queue_depth": "queue_depth",
    "parallel.aio_intra_op_parallelism": "intra_op_parallelism",
    "parallel.sharding_strategy": "fsdp_sharding_strategy",
    "parallel.reshard_after_forward": "fsdp_reshard_after_forward",
    "parallel.cpu_offload": "fsdp_offload_params offload_policy",
    "parallel.transformer_layer_cls_to_wrap": (
        "fsdp_transformer_layer_cls_to_wrap fsdp_auto_wrap_policy fsdp_min_num_params"
    ),
    "parallel.reduce_dtype": "mixed_precision_reduce_dtype communication_data_type",
    "parallel.state_dict_type": "fsdp_state_dict_type",
    "parallel.replicate_size": "dp_replicate_size parallelism_config_dp_replicate_size hsdp",
    "parallel.tensor_parallel_size": "tp_size parallelism_config_tp_size tensor_parallel",
    "parallel.context_parallel_size": "cp_size parallelism_config_cp_size context_parallel",
    "parallel.sequence_parallel_size": "sp_size parallelism_config_sp_size ulysses sequence_parallel",
    "parallel.extra_config": (
        "fsdp_config fsdp_backward_prefetch fsdp_use_orig_params fsdp_forward_prefetch fsdp_cpu_ram_efficient_loading "
        "ds_config deepspeed_config_file stage3_prefetch_bucket_size overlap_comm"
    ),
    "eval.strategy": "eval_strategy evaluation_strategy do_eval eval_on_start",
    "eval.per_device_eval_batch_size": "eval_batch_size per_gpu_eval_batch_size",
    "eval.early_stopping_patience": "patience",

    "eval.max_new_tokens": "generation_max_length",
    "save.strategy": "save_strategy",
    "save.steps": "save_steps",
    "save.keep_best": "save_top_k",
    "save.load_best_model_at_end": "metric_for_best_model greater_is_better",
    "save.resume_from": "resume_from_checkpoint",
    "save.merge_adapter": "merge_and_unload",
    "logging.steps": "logging_strategy",
    "logging.level": "log_level",
    "launch.device": "use_cpu",
    "launch.devices": "gpu_ids cuda_visible_devices",
    "launch.nproc_per_node": "num_processes num_gpus nproc num_gpus_per_node",
    "launch.rendezvous": "rdzv_backend rdzv_conf standalone",
    "launch.nnodes": "num_machines num_nodes",
    "launch.node_rank": "machine_rank",
    "launch.master_addr": "main_process_ip rdzv_endpoint",
    "launch.master_port": "main_process_port rdzv_port",
    "launch.hostfile": "hosts deepspeed_hostfile",
    "launch.include": "deepspeed_inclusion_filter",
    "launch.omp_num_threads": "num_cpu_threads_per_process omp_threads",
    "launch.cuda_env_defaults": "pytorch_cuda_alloc_conf pytorch_alloc_conf",
    "launch.extra_accelerate_config": "accelerate_config config_file",
    "launch.env": "environment_variables hub_token hf_token",
    "slurm.time_limit": "time",
    "slurm.cpus": "cpus_per_task",
    "slurm.memory_gib": "mem",
    "slurm.extra": "sbatch",
}  # fmt: skip
ALIASES: Mapping[str, str] = {
    **{name: option for name, option in OPTION_NAMES.items() if not option.endswith(f".{name}")},
    **{name: option for option, names in NAMES.items() for name in names.split()},
}

# Words that no library uses, but people may guess -> option keys.
GUESSES: Mapping[str, str] = {
    "data.datasets": "data.sources",
    "data.learn": "data.loss_on",
    "parallel.engine_keys": "parallel.extra_config",
    "evaluation.when": "eval.strategy",
    "checkpoint.keep": "save.total_limit",
}

# Option -> value -> what other libraries call the value, or people may guess.
VALUES: Mapping[str, Mapping[str, str]] = {
    "data.mixing": {
        "concatenate": "concat", "interleave_first_exhausted": "first_exhausted interleave_under",
        "interleave_all_exhausted": "all_exhausted interleave_over",
    },
    "model.attn_implementation": {
        "flash_attention_2": "flash_attention flash_attn flash fa2 kernels-community/flash-attn2",
        "flash_attention_3": "fa3 kernels-community/flash-attn3",
    },
    "method.kind": {"lora": "qlora peft", "full": "full_finetuning"},
    "method.quantization": {"nf4": "4bit bnb_4bit 4", "int8": "8bit bnb_8bit 8"},
    "lora.init": {"default": "true kaiming", "pissa_fast": "pissa_niter_16"},
    "train.stage": {"pretraining": "pt", "reward": "rm reward_model"},
    "train.lr_scheduler_type": {
        "constant_with_warmup": "constant_with_warm_up", "cosine": "warmup_cosine cosine_with_restarts",
        "cosine_with_min_lr": "cosine_with_min_lr_rate cosine_warmup_with_min_lr", "warmup_stable_decay": "wsd",
    },
    "train.optim": {
        "adamw_torch": "adam adamw adamw_hf", "adamw_torch_fused": "adamw_fused",
        "adamw_torch_npu_fused": "adamw_npu_fused", "adamw_bnb_8bit": "adamw_8bit",
        "adamw_torch_8bit": "adamw_8bit_torchao", "adamw_torch_4bit": "adamw_4bit_torchao",
        "paged_adamw_32bit": "adamw_paged paged_adamw", "paged_adamw_8bit": "adamw_paged_8bit",
        "paged_ademamix_32bit": "ademamix_paged", "paged_ademamix_8bit": "ademamix_paged_8bit", "lion_32bit": "lion",
        "paged_lion_32bit": "lion_paged paged_lion", "paged_lion_8bit": "lion_paged_8bit", "galore_adamw": "galore",
        "galore_adamw_layerwise": "galore_layerwise", "galore_adamw_8bit": "galore_8bit",
        "galore_adamw_8bit_layerwise": "galore_8bit_layerwise", "apollo_adamw": "apollo",
        "apollo_adamw_layerwise": "apollo_layerwise", "rmsprop_bnb_8bit": "rmsprop_8bit rmsprop_bnb",
    },
    "precision.compute": {
        "bf16": "bfloat16 mixed", "fp16": "float16 half", "fp32": "float32 no", "pure_bf16": "bf16_full",
    },
    "preference.dpo_loss_type": {"sigmoid": "dpo", "sigmoid_norm": "simpo", "exo_pair": "exo", "nca_pair": "nca"},
    "parallel.strategy": {
        "single": "none no", "ddp": "multi_gpu", "fsdp2": "fsdp fully_shard full_shard",
        "zero2": "deepspeed zero zero_2", "zero1": "zero_1", "zero3": "zero_3", "tensor": "tp tensor_parallel",
    },
    "parallel.state_dict_type": {"full": "full_state_dict", "sharded": "sharded_state_dict"},
    "parallel.reduce_dtype": {"fp32": "float32", "compute": "bf16 bfloat16"},
    "data.format": {"messages": "openai chatml", "pairs": "preference", "prompt_completion": "completion"},
    "data.loss_on": {"completions": "answers completion assistant", "all_tokens": "all"},
    "eval.strategy": {"no": "none false", "epoch": "epochs", "steps": "step"},
    "save.strategy": {"no": "none false", "epoch": "epochs best", "steps": "step"},
    "save.resume_from": {"scratch": "anew", "latest": "true last"},
    "launch.device": {"cuda": "gpu rocm"},
    "launch.rendezvous": {"elastic": "c10d"},
}  # fmt: skip
VALUE_ALIASES: Mapping[str, Mapping[str, str]] = {
    option: {name: value for value, names in values.items() for name in names.split()}
    for option, values in VALUES.items()
}

"""Names of LLaMA-Factory 0.9 (hparams/*.py) for options and values that Footplate has too. The importer reads them in
one direction, the launch with LLaMA-Factory in the other."""

from __future__ import annotations

from collections.abc import Mapping

NAME = "LLaMA-Factory"
# Option of LLaMA-Factory -> Footplate's option with the same meaning.
OPTION_NAMES: Mapping[str, str] = {
    "model_revision": "model.revision", "trust_remote_code": "model.trust_remote_code",
    "cutoff_len": "data.max_length", "max_samples": "data.max_samples", "default_system": "data.system_prompt",
    "preprocessing_num_workers": "data.dataset_num_proc", "streaming": "data.streaming",
    "freeze_trainable_layers": "method.freeze_trainable_layers",
    "double_quantization": "method.bnb_4bit_use_double_quant",
    "lora_rank": "lora.r", "lora_alpha": "lora.alpha", "lora_dropout": "lora.dropout", "use_dora": "lora.use_dora",
    "use_rslora": "lora.use_rslora", "loraplus_lr_ratio": "lora.loraplus_lr_ratio",
    "num_train_epochs": "train.num_train_epochs",
    "per_device_train_batch_size": "train.per_device_train_batch_size",
    "gradient_accumulation_steps": "train.gradient_accumulation_steps", "learning_rate": "train.learning_rate",
    "weight_decay": "train.weight_decay", "adam_beta1": "train.adam_beta1", "adam_beta2": "train.adam_beta2",
    "adam_epsilon": "train.adam_epsilon", "max_grad_norm": "train.max_grad_norm", "seed": "train.seed",
    "neftune_noise_alpha": "train.neftune_noise_alpha", "torch_compile": "train.torch_compile",
    "enable_liger_kernel": "train.use_liger_kernel", "use_unsloth": "train.use_unsloth",
    "dataloader_num_workers": "train.dataloader_num_workers",
    "pref_beta": "preference.beta", "pref_ftx": "preference.sft_loss_weight",
    "dpo_label_smoothing": "preference.label_smoothing", "kto_chosen_weight": "preference.desirable_weight",
    "kto_rejected_weight": "preference.undesirable_weight",
    "per_device_eval_batch_size": "eval.per_device_eval_batch_size", "eval_steps": "eval.steps",
    "early_stopping_steps": "eval.early_stopping_patience",
    "save_total_limit": "save.total_limit", "save_only_model": "save.only_model",
    "load_best_model_at_end": "save.load_best_model_at_end",
    "run_name": "logging.run_name", "logging_steps": "logging.steps",
    "ddp_find_unused_parameters": "parallel.ddp_find_unused_parameters",
}  # fmt: skip
STAGES = {"pt": "pretraining", "sft": "sft", "rm": "reward", "dpo": "dpo", "kto": "kto"}
ATTENTIONS = {
    "auto": "auto", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3",
}  # fmt: skip
MEGATRON = {  # mcore_adapter 0.10, training_args.py
    "tensor_model_parallel_size": "llamafactory.tensor_parallel_size",
    "pipeline_model_parallel_size": "llamafactory.pipeline_parallel_size",
    "virtual_pipeline_model_parallel_size": "llamafactory.virtual_pipeline_size",
    "context_parallel_size": "llamafactory.context_parallel_size",
    "expert_model_parallel_size": "llamafactory.expert_parallel_size",
    "sequence_parallel": "llamafactory.sequence_parallel",
}

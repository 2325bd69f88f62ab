"""The order and sections of the form: where each option is placed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from webui.form import Form


@contextmanager
def section(key: str, title: str) -> Iterator[None]:
    """A section of the form with a heading that opens and closes it; closed, it summarizes what is set."""
    with gr.Column(elem_id=f"fp-section-{key}", elem_classes=["fp-section"]):
        gr.HTML(
            f'<button type="button" class="fp-head" aria-expanded="true"><span class="fp-head-title">{title}</span>'
            '<span class="fp-head-summary"></span><span class="fp-chevron" aria-hidden="true"></span></button>',
            apply_default_css=False,
            padding=False,
        )
        with gr.Column(elem_classes=["fp-body"]):
            yield


@contextmanager
def fields(more: bool = False) -> Iterator[None]:
    """A grid of fields; with `more`, hidden behind a button, for options that are rarely changed."""
    if more:
        gr.HTML(
            '<button type="button" class="fp-more" aria-expanded="false">More options</button>',
            apply_default_css=False,
            padding=False,
        )
    with gr.Row(elem_classes=["fp-grid", "fp-advanced"] if more else ["fp-grid"]):
        yield


def _static(html: str) -> None:
    gr.HTML(html, apply_default_css=False, padding=False)


def place_options(form: Form) -> None:
    """Place every option."""
    form.place("logging.run_name")
    _model(form)
    _devices(form)
    _data(form)
    _method(form)
    _train(form)
    _outputs(form)


def _model(form: Form) -> None:
    with section("model", "Model"):
        with fields():
            form.place("model.source", "model.builtin", "model.path", "model.hub_id", "model.revision")
        _static('<details id="fp-hub-token" data-with="model.hub_id"><summary>Hugging Face token</summary></details>')
        with fields(more=True):
            form.place(
                "precision.compute", "precision.fp8_backend", "model.attn_implementation", "model.trust_remote_code"
            )


def _data(form: Form) -> None:
    with section("data", "Data"):
        with fields():
            form.place("data.source", "data.builtin", "data.files", "data.hub_id", "data.hub_config")
            form.place("data.hub_split", "data.format", "data.messages_column", "data.prompt_column")
            form.place("data.completion_column", "data.chosen_column", "data.rejected_column", "data.label_column")
            form.place("data.text_column", "data.system_column", "data.loss_on", "data.max_length")
            form.place("data.validation", "data.validation_split", "data.validation_files", "data.weight")
            form.place("data.mixing", "data.sources")
        _static('<div class="fp-data-actions"><div id="fp-uploads"></div><div id="fp-datasets"></div></div>')
        with fields(more=True):
            form.place("data.chat_template", "data.chat_template_file", "data.max_samples", "data.dataset_num_proc")
            form.place("data.packing", "data.streaming", "data.drop_duplicates", "data.chat_template_kwargs")
            form.place("data.system_prompt", "data.on_bad_example", "data.add_special_tokens", "data.add_tokens")


def _method(form: Form) -> None:
    with section("method", "Method"):
        with fields():
            form.place("method.kind", "train.stage", "method.quantization")
            form.place(
                "preference.dpo_loss_type", "preference.kto_loss_type", "preference.beta", "preference.label_smoothing"
            )
            form.place("preference.sft_loss_weight", "preference.desirable_weight", "preference.undesirable_weight")
            form.place("preference.precompute_ref_log_probs", "preference.center_rewards_coefficient")
            form.place("lora.r", "lora.alpha", "lora.dropout", "lora.targets")
            form.place("lora.target_modules", "method.freeze_trainable_layers", "method.freeze_extra_modules")
        with fields(more=True):
            form.place("lora.init", "lora.loraplus_lr_ratio", "lora.use_dora", "lora.use_rslora", "lora.adapter_path")
            form.place("lora.modules_to_save", "train.neftune_noise_alpha", "method.bnb_4bit_use_double_quant")


def _train(form: Form) -> None:
    with section("train", "Training"):
        with fields():
            form.place("train.duration", "train.num_train_epochs", "train.max_steps", "train.learning_rate")
            form.place(
                "train.per_device_train_batch_size",
                "train.gradient_accumulation_steps",
                "train.lr_scheduler_type",
                "train.warmup_steps",
            )
            form.place(
                "train.optim", "train.projection_rank", "train.update_proj_gap", "train.badam_switch_block_every"
            )
            form.place("train.momentum", "train.activation_checkpointing")
        with fields(more=True):
            form.place(
                "train.weight_decay",
                "train.max_grad_norm",
                "train.adam_beta1",
                "train.adam_beta2",
                "train.adam_epsilon",
            )
            form.place("train.optim_targets", "train.optim_target_modules", "train.galore_scale")
            form.place("train.galore_proj_type", "train.apollo_scale", "train.apollo_proj")
            form.place("train.apollo_scale_type", "train.badam_switch_mode")
            form.place("train.seed", "train.dataloader_num_workers", "train.train_sampling_strategy")
            form.place("train.max_nonfinite_steps", "train.stop_on_spike", "train.half_lr_retries", "train.max_hours")
            form.place("train.use_liger_kernel", "train.use_unsloth", "train.torch_compile")


def _devices(form: Form) -> None:
    with section("launch", "Devices and strategy"):
        with fields():
            form.place("launch.place", "launch.device")
        _static('<div id="fp-devices" aria-labelledby="fp-devices-title" role="group" hidden></div>')
        _static('<div id="fp-strategies" role="radiogroup" aria-label="Distributed strategy" hidden></div>')
        with fields():
            form.place("launch.devices", "parallel.strategy", "launch.nproc_per_node")
            form.place("parallel.offload_optimizer", "parallel.offload_param", "parallel.nvme_path")
            form.place(
                "parallel.sharding_strategy",
                "parallel.cpu_offload",
                "parallel.replicate_size",
                "parallel.tensor_parallel_size",
            )
            form.place(
                "launch.rendezvous", "launch.nnodes", "launch.min_nnodes", "launch.node_rank", "launch.master_addr"
            )
            form.place("launch.max_restarts", "launch.hostfile", "launch.include")
            form.place("slurm.partition", "slurm.time_limit", "slurm.requeue")
            form.place("kubernetes.image", "kubernetes.volumes")
        with fields(more=True):
            form.place("launch.trainer", "llamafactory.backend", "llamafactory.environment", "llamafactory.template")
            form.place("llamafactory.tensor_parallel_size", "llamafactory.pipeline_parallel_size")
            form.place("llamafactory.virtual_pipeline_size", "llamafactory.context_parallel_size")
            form.place("llamafactory.expert_parallel_size", "llamafactory.sequence_parallel")
            form.place("llamafactory.kt_backend", "llamafactory.kt_weight_path", "llamafactory.kt_num_threads")
            form.place("llamafactory.extra_args")
            form.place("launch.gpu_model", "slurm.account", "slurm.qos", "slurm.constraint")
            form.place("slurm.cpus", "slurm.memory_gib", "slurm.setup", "slurm.extra")
            form.place("slurm.container", "slurm.container_mounts", "slurm.container_python")
            form.place("ray.cpus", "ray.resources", "ray.python")
            form.place("kubernetes.queue", "kubernetes.namespace", "kubernetes.node_labels", "kubernetes.cpus")
            form.place("kubernetes.memory_gib", "kubernetes.gpu_resource", "kubernetes.resources")
            form.place("kubernetes.tolerations", "kubernetes.priority_class", "kubernetes.service_account")
            form.place("kubernetes.secret", "kubernetes.python", "kubernetes.kubeflow_runtime")
            form.place("kubernetes.extra_pod_spec")
            form.place("launch.launcher", "launch.master_port", "launch.rdzv_id", "launch.omp_num_threads")
            form.place("parallel.bucket_cap_mb", "parallel.ddp_timeout")
            form.place("parallel.ddp_find_unused_parameters", "parallel.pin_memory", "parallel.nvme_buffer_count")
            form.place("parallel.nvme_buffer_size_mb", "parallel.aio_block_size_kb", "parallel.aio_queue_depth")
            form.place("parallel.aio_intra_op_parallelism", "parallel.reshard_after_forward", "parallel.reduce_dtype")
            form.place(
                "parallel.state_dict_type",
                "parallel.transformer_layer_cls_to_wrap",
                "parallel.context_parallel_size",
                "parallel.sequence_parallel_size",
            )
            form.place("launch.cuda_env_defaults", "launch.env", "parallel.extra_config")
            form.place("launch.extra_accelerate_config")


def _outputs(form: Form) -> None:
    with section("evaluation", "Evaluation"), fields():
        form.place("eval.strategy", "eval.steps", "eval.per_device_eval_batch_size", "eval.num_generations")
        form.place("eval.max_new_tokens", "eval.generate_during_eval")
        form.place("eval.early_stopping_patience", "eval.early_stopping_threshold")
    with section("checkpoint", "Checkpoints"):
        with fields():
            form.place("save.strategy", "save.steps", "save.total_limit", "save.resume_from")
            form.place("save.resume_path", "save.final_model", "save.merge_adapter")
        with fields(more=True):
            form.place("save.load_best_model_at_end", "save.keep_best", "save.only_model", "save.stop_timeout")
    with section("logging", "Logging"), fields():
        form.place("logging.steps", "logging.level", "logging.report_to")

"""Where each option sits. Plain Gradio that only places names; beauty stays in human hands.

Floor 6. Imports: form, gradio.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import gradio as gr

from webui.form import Form


@contextmanager
def section(key: str, title: str) -> Iterator[None]:
    """A part of the form with a heading that opens and closes it; closed, it says what is set."""
    with gr.Column(elem_id=f"fp-section-{key}", elem_classes=["fp-section"]):
        gr.HTML(
            f'<button type="button" class="fp-head" aria-expanded="true"><span class="fp-head-title">{title}</span>'
            '<span class="fp-head-said"></span><span class="fp-chevron" aria-hidden="true"></span></button>',
            apply_default_css=False,
            padding=False,
        )
        with gr.Column(elem_classes=["fp-body"]):
            yield


@contextmanager
def fields(more: bool = False) -> Iterator[None]:
    """A grid of fields; with `more`, behind a small button for what is rarely changed."""
    if more:
        gr.HTML(
            '<button type="button" class="fp-more" aria-expanded="false">More options</button>',
            apply_default_css=False,
            padding=False,
        )
    with gr.Row(elem_classes=["fp-grid", "fp-rare"] if more else ["fp-grid"]):
        yield


def arrange(form: Form) -> None:
    """Place every option."""
    form.place("logging.name")
    _learn(form)
    _train(form)
    _watch(form)


def _learn(form: Form) -> None:
    with section("model", "Model"):
        with fields():
            form.place("model.source", "model.builtin", "model.path", "model.hub_id", "model.revision")
        with fields(more=True):
            form.place("precision.compute", "precision.fp8_backend", "model.attention", "model.trust_remote_code")
    with section("data", "Data"):
        with fields():
            form.place("data.source", "data.builtin", "data.files", "data.hub_id", "data.hub_config")
            form.place("data.hub_split", "data.format", "data.messages_column", "data.prompt_column")
            form.place("data.completion_column", "data.chosen_column", "data.rejected_column", "data.label_column")
            form.place("data.text_column", "data.learn", "data.max_length")
            form.place("data.validation", "data.validation_split", "data.validation_files")
        with fields(more=True):
            form.place("data.template", "data.template_file", "data.max_samples", "data.workers")
            form.place("data.packing", "data.system")


def _train(form: Form) -> None:
    with section("method", "Method"):
        with fields():
            form.place("method.kind", "train.stage", "method.quantization")
            form.place("preference.dpo_loss", "preference.kto_loss", "preference.beta", "preference.label_smoothing")
            form.place("preference.sft_weight", "preference.desirable_weight", "preference.undesirable_weight")
            form.place("preference.precompute", "preference.center_rewards")
            form.place("method.lora_rank", "method.lora_alpha", "method.lora_dropout", "method.lora_targets")
            form.place("method.lora_target_modules", "method.freeze_layers", "method.freeze_also")
        with fields(more=True):
            form.place("method.lora_init", "method.lora_plus", "method.lora_dora", "method.lora_rslora")
            form.place("method.lora_modules_to_save", "train.neftune", "method.double_quantization")
    with section("train", "Training"):
        with fields():
            form.place("train.length", "train.epochs", "train.max_steps", "train.learning_rate")
            form.place("train.batch_size", "train.accumulation", "train.scheduler", "train.warmup")
            form.place("train.optimizer", "train.projection_rank", "train.projection_gap", "train.block_steps")
            form.place("train.momentum", "train.activation_checkpointing")
        with fields(more=True):
            form.place("train.weight_decay", "train.max_grad_norm", "train.beta1", "train.beta2", "train.epsilon")
            form.place("train.projection_targets", "train.projection_modules", "train.galore_scale")
            form.place("train.galore_projection", "train.apollo_scale", "train.apollo_projection")
            form.place("train.apollo_scaling", "train.block_order")
            form.place("train.seed", "train.dataloader_workers", "train.group_by_length")
            form.place("train.liger", "train.unsloth", "train.compile")
    with section("launch", "Devices"):
        with fields():
            form.place("parallel.strategy", "launch.processes", "launch.device", "launch.devices")
            form.place("parallel.offload_optimizer", "parallel.offload_parameters", "parallel.nvme_path")
            form.place("parallel.sharding", "parallel.cpu_offload", "parallel.replicas", "parallel.tensor")
            form.place("launch.rendezvous", "launch.nodes", "launch.min_nodes", "launch.node_rank", "launch.address")
            form.place("launch.max_restarts", "launch.hosts", "launch.include")
        with fields(more=True):
            form.place("launch.launcher", "launch.port", "launch.rendezvous_id", "launch.threads")
            form.place("parallel.bucket_mb", "parallel.timeout")
            form.place("parallel.find_unused_parameters", "parallel.pin_memory", "parallel.nvme_buffers")
            form.place("parallel.nvme_buffer_mb", "parallel.aio_block_kb", "parallel.aio_queue_depth")
            form.place("parallel.aio_threads", "parallel.reshard_after_forward", "parallel.reduce_precision")
            form.place("parallel.state_dict", "parallel.wrap_layers", "parallel.context", "parallel.sequence")
            form.place("launch.memory_settings", "launch.environment", "parallel.engine_keys")
            form.place("launch.accelerate_keys")


def _watch(form: Form) -> None:
    with section("evaluation", "Evaluation"), fields():
        form.place("evaluation.when", "evaluation.steps", "evaluation.batch_size", "evaluation.samples")
        form.place("evaluation.max_new_tokens")
    with section("checkpoint", "Checkpoints"):
        with fields():
            form.place("checkpoint.when", "checkpoint.steps", "checkpoint.keep", "checkpoint.start")
            form.place("checkpoint.path", "checkpoint.save_model", "checkpoint.merge")
        with fields(more=True):
            form.place("checkpoint.best", "checkpoint.weights_only")
    with section("logging", "Logging"), fields():
        form.place("logging.steps", "logging.level", "logging.report_to")

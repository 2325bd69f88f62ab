"""RunSpec: the options of a run, each declared once.

An option is one field (type, limits, label, visibility condition, default), and its help is the docstring below it.
Pydantic checks each value alone; constraints between options, or on the machine, are rules (`backend/rules`). Values
that follow from others are in `backend/resolve.py`. Hidden options have no effect and are not written to a spec
(`options.effective`).
"""

from __future__ import annotations

from collections.abc import Collection

from backend import registry
from backend.config.data import Data, Source
from backend.config.fields import Condition, OneOf, Section, Ui
from backend.config.kubernetes import Kubernetes
from backend.config.launch import Launch
from backend.config.method import Lora, Method
from backend.config.model import Model
from backend.config.other_trainer import LlamaFactory
from backend.config.outputs import Eval, Logging, Save
from backend.config.parallel import Parallel
from backend.config.preference import Preference
from backend.config.ray import Ray
from backend.config.slurm import Slurm
from backend.config.training import Precision, Train


class RunSpec(Section):
    """The options of a run."""

    model: Model = Model()
    data: Data = Data()
    method: Method = Method()
    lora: Lora = Lora()
    train: Train = Train()
    preference: Preference = Preference()
    precision: Precision = Precision()
    parallel: Parallel = Parallel()
    eval: Eval = Eval()
    save: Save = Save()
    logging: Logging = Logging()
    launch: Launch = Launch()
    slurm: Slurm = Slurm()
    ray: Ray = Ray()
    kubernetes: Kubernetes = Kubernetes()
    llamafactory: LlamaFactory = LlamaFactory()

    @property
    def needs_loaded_weights(self) -> bool:
        """Whether preparing the model needs the loaded weights: they are converted to 8 bits or FP8, the adapter or new
        rows of the embeddings are initialized from them, or remote code may do anything. For 4-bit weights, the scales
        are enough."""
        subtracts_adapter = registry.LORA_INITS[self.lora.init].changes_base_weights
        bits = registry.QUANTIZATIONS[self.method.quantization].bits
        dequantizes = bits == 4 and self.lora.use_dora  # DoRA needs the norms of the weights
        lora_changes = self.method.kind == "lora" and (subtracts_adapter or bits == 8 or dequantizes)
        new_rows = bool(self.data.added_tokens)
        return self.precision.compute == "fp8" or lora_changes or new_rows or self.model.trust_remote_code

    @property
    def other_backend(self) -> str:
        """The backend of LLaMA-Factory that trains instead of transformers: megatron or ktransformers; '' for none."""
        backend = self.llamafactory.backend
        return backend if self.launch.trainer == "llamafactory" and backend != "transformers" else ""

    @property
    def fp32_master_weights(self) -> bool:
        """Whether trainable parameters, gradients and optimizer state are kept in fp32, whatever the compute dtype."""
        return registry.PRECISIONS[self.precision.compute].fp32_master_weights

    @property
    def needs_reference_model(self) -> bool:
        """Whether a preference stage loads a reference model. With LoRA, the reference is the model without its
        adapter. Precomputed log-probs come from the model before training; but FSDP shards that model only when
        training starts, so with FSDP they come from a second model, which is freed before training."""
        if self.preference.precompute_ref_log_probs:
            loads_second_model = self.parallel.strategy in registry.FSDP
        else:
            loads_second_model = self.method.kind != "lora"
        return registry.STAGES[self.train.stage].uses_reference_model and loads_second_model

    @property
    def compares_examples(self) -> bool:
        """Whether the loss of an example depends on the others of its batch, so that smaller batches change the result:
        AOT sorts the log-ratios of a batch, and KTO's KL term pairs its prompts with other completions."""
        losses = {"dpo": self.preference.dpo_loss_type, "kto": self.preference.kto_loss_type}
        return losses.get(self.train.stage) in ("aot", "aot_unpaired", "kto")

    @property
    def has_param_groups(self) -> bool:
        """Whether the optimizer has several parameter groups: weight decay skips norms and biases, and LoRA+ has two
        learning rates."""
        all_decay = {"lm_head", "embed_tokens"}.issuperset(self.lora.modules_to_save)
        return self.method.kind != "lora" or self.lora.loraplus_lr_ratio > 1 or not all_decay

    def adapts_experts(self, stacked_modules: Collection[str]) -> bool:
        """Whether the experts of an MoE model get adapters; peft targets them by the names in `stacked_modules`."""
        if self.method.kind != "lora" or not stacked_modules:
            return False
        targets = self.lora.target_modules if self.lora.targets == "custom" else ()
        return self.lora.targets == "all-linear" or any(name in stacked_modules for name in targets)

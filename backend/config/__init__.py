"""RunSpec: everything a person decides about a run, each option declared once.

Floor 1. An option is one line (type, limits, label, when it is shown, default) and its help is the docstring
below it. Nothing derived is kept here, and nothing about this machine. Type and limits of one field are pydantic's;
whatever needs two fields, or the machine, is a rule (`backend/rules`). Hidden options are without effect: a
spec is written without them (`options.effective`).
"""

from __future__ import annotations

from collections.abc import Collection

from backend import registry
from backend.config.data import Data
from backend.config.fields import Condition, OneOf, Section, Ui
from backend.config.launch import Launch
from backend.config.method import Lora, Method
from backend.config.model import Model
from backend.config.outputs import Eval, Logging, Save
from backend.config.parallel import Parallel
from backend.config.preference import Preference
from backend.config.training import Precision, Train

__all__ = ["Condition", "Data", "Launch", "Lora", "Method", "Model", "OneOf", "RunSpec", "Ui"]


class RunSpec(Section):
    """A run, as a person described it."""

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

    @property
    def modifies_loaded_weights(self) -> bool:
        """Whether the model is made anew out of its weights (packed, cast to fp8, adapters that begin inside them), or
        by code of its own."""
        moves = registry.LORA_INITS[self.lora.init].changes_base_weights
        packs = registry.QUANTIZATIONS[self.method.quantization].bits > 0
        remade = self.precision.compute == "fp8" or (self.method.kind == "lora" and (moves or packs))
        return remade or self.model.trust_remote_code

    @property
    def needs_reference_model(self) -> bool:
        """Whether a second model is read, to which a preference stage holds the first. An adapter is its own reference,
        once it is switched off; but FSDP spreads what is trained only when the training starts, so what is computed
        before is asked of another one, which is let go again."""
        before, whole = self.preference.precompute_ref_log_probs, self.method.kind != "lora"
        held = self.parallel.strategy in registry.FSDP if before else whole
        return registry.STAGES[self.train.stage].uses_reference_model and held

    @property
    def has_param_groups(self) -> bool:
        """Whether the optimizer has several groups of weights: norms and biases do not decay, LoRA+ has two rates."""
        decaying = {"lm_head", "embed_tokens"}.issuperset(self.lora.modules_to_save)
        return self.method.kind != "lora" or self.lora.loraplus_lr_ratio > 1 or not decaying

    def adapts_experts(self, stacked: Collection[str]) -> bool:
        """Whether adapters are placed on a mixture's experts, whose linear layers peft knows by the names `stacked`."""
        named = self.lora.targets == "custom" and any(name in stacked for name in self.lora.target_modules)
        return self.method.kind == "lora" and bool(stacked) and (self.lora.targets == "all-linear" or named)

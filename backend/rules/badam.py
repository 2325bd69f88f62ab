"""The rule about modules that BAdam does not train."""

from __future__ import annotations

from backend import registry
from backend.modelspec import ModelShape, matches
from backend.rules.base import Case, Example, Violation, error, names
from backend.rules.common_fixes import ADAMW
from backend.rules.examples import EQUIPPED

EXTRA = "method.freeze_extra_modules"
LAST_TWO_AND_HEAD = {
    "method.kind": "freeze", "method.freeze_trainable_layers": 2, EXTRA: ("lm_head",), "train.optim": "badam",
}  # fmt: skip


@error(
    "OPT033",
    fields=("train.optim", "train.stage", "lora.modules_to_save", EXTRA, "data.add_tokens"),
    title="BAdam trains decoder layers only",
    source="badam 1.4 block_optim.py, switch_trainable_params: only parameters of the active block are trained; with "
    "LoRA, only those of adapters",
    fixes=(ADAMW,),
    fails_on=Example(LAST_TWO_AND_HEAD, EQUIPPED),
    passes_on=Example({**LAST_TWO_AND_HEAD, EXTRA: ()}, EQUIPPED),
)
def badam_leaves_modules_untrained(case: Case) -> Violation | None:
    """BAdam trains one decoder layer at a time and never anything outside of the layers: the new head of a reward
    model would keep its random values, as would the embeddings of added tokens, and other modules that the run is to
    train in full would not change. With full fine-tuning, the embeddings of other tokens also stay as they are."""
    if case.optimizer.state_layout != "one_block":
        return None
    method, data, found = case.spec.method, case.spec.data, {}
    if registry.STAGES[case.spec.train.stage].is_reward_model:
        found["train.stage"] = "the head of the reward model"
    if method.kind == "lora" and case.spec.lora.modules_to_save:
        found["lora.modules_to_save"] = names(case.spec.lora.modules_to_save)
    if method.kind == "freeze" and case.shape and (outside := _outside(case.shape, method.freeze_extra_modules)):
        found[EXTRA] = names(outside)
    if data.added_tokens:
        found["data.add_tokens" if data.add_tokens else "data.add_special_tokens"] = "the embeddings of added tokens"
    if not found:
        return None
    message = f"{case.optimizer.label} would not train {names(list(found.values()))}, which this run is to train."
    return Violation(message, fields=("train.optim", *found))


def _outside(shape: ModelShape, extra: tuple[str, ...]) -> list[str]:
    """Names of modules outside of the decoder layers."""
    return [name for name in extra if any(matches(leaf.path, name) for leaf in shape.non_layer_modules)]

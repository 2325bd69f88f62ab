"""Which model types DeepSpeed-Ulysses trains as one process does.

Ulysses divides each sequence among the ranks and exchanges tokens for heads around transformers' attention function. So
a type is trained correctly if that function gets the same for the second half of a sequence as for that half in the
whole sequence, and needs nothing else: no mask but the causal one, no bias, and no other layer that mixes tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import skip_checks
import torch
from architectures import build, is_causal, model_types, save, tokens
from cited import cites
from fork_server import ForkServer
from parameters import soak_except
from training_runs import REORDERING_TOLERANCE, losses, make_spec, read_metrics, same_losses
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from backend.config import RunSpec
from backend.config.options import edit
from backend.machine import Machine
from backend.preflight import preflight
from backend.registry import SEQUENCE_PARALLEL_TYPES
from backend.train import trainers
from backend.train.patches import ulysses_heads

COUNT = 200  # tokens of the sequence: more than the sliding window of the models
NEUTRAL = {"scaling", "dropout", "is_causal", "position_ids", "output_router_logits", "use_cache", "output_attentions"}
NEUTRAL |= {"sliding_window"}  # for rule STR056, which compares it with the length of the sequences
FULL = {"method.kind": "full", "save.final_model": False, "data.max_length": 128}
SEQUENCE = {"parallel.strategy": "zero2", "parallel.sequence_parallel_size": 2, "launch.nproc_per_node": 2}
KINDS = ("qwen3_moe", "deepseek_v3", "gpt_neox", "mixtral", "diffllama", "gpt2", "minicpm3", "glm4_moe_lite")
SAMPLE = ("llama", "gpt2", "mistral", "llama4_text", "qwen3_next", "opt", "deepseek_v3", "mamba", "bart", "falcon")


class Recorder:
    """An attention function in which no token sees another one; it records its arguments."""

    def __init__(self) -> None:
        self.calls: list[tuple[tuple[torch.Tensor, ...], torch.Tensor | None, Mapping[str, Any]]] = []

    def __call__(self, module: Any, query: Any, key: Any, value: Any, attention_mask: Any, **more: Any) -> Any:
        self.calls.append(((query, key, value), attention_mask, more))
        return value.repeat_interleave(query.shape[1] // value.shape[1], dim=1).transpose(1, 2).contiguous(), None


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    found, original = Recorder(), ALL_ATTENTION_FUNCTIONS["sdpa"]
    ALL_ATTENTION_FUNCTIONS["sdpa"] = found
    yield found
    ALL_ATTENTION_FUNCTIONS["sdpa"] = original


def is_divisible(kind: str, recorder: Recorder) -> bool:
    """Whether Ulysses computes what one process computes, if the sliding window is longer than the sequences."""
    model, ids = build(kind, attn_implementation="sdpa").eval(), torch.tensor([tokens(COUNT)])

    def run(begin: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        recorder.calls.clear()
        positions = torch.arange(begin, COUNT)[None]
        with torch.no_grad():
            found = model(input_ids=ids[:, begin:], position_ids=positions, use_cache=False)
        return found.logits[:, COUNT // 2 - begin :], [each for call in recorder.calls for each in call[0]]

    logits, shard = run(COUNT // 2)
    all_logits, whole = run(0)
    if not shard or len(shard) != len(whole) or any(map(needs_more, recorder.calls)):
        return False
    same = (torch.allclose(a, b[:, :, COUNT // 2 :], atol=1e-5) for a, b in zip(shard, whole, strict=True))
    return torch.allclose(logits, all_logits, atol=1e-5) and all(same)


def needs_more(call: Any) -> bool:
    """Whether an attention call needs more than causal attention, or lacks the positions that Ulysses gathers."""
    _, mask, more = call
    extra = {name for name, value in more.items() if value is not None} - NEUTRAL
    return (
        bool(extra)
        or "position_ids" not in more
        or not (mask is None or more.get("sliding_window") or is_triangle(mask))
    )


def is_triangle(mask: torch.Tensor) -> bool:
    allowed = mask[0, 0] if mask.dtype == torch.bool else mask[0, 0] == 0
    return bool(torch.equal(allowed, torch.ones_like(allowed).tril()))


@cites("STR047")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", soak_except(model_types(), SAMPLE))
def test_types_that_ulysses_computes_as_one_process(kind: str, recorder: Recorder) -> None:
    try:
        divisible = is_divisible(kind, recorder) and is_causal(build(kind, attn_implementation="eager"))
    except Exception:  # it cannot be built with SDPA, or be given positions
        divisible = False
    assert divisible is (kind in SEQUENCE_PARALLEL_TYPES)


@pytest.mark.soak
@pytest.mark.parametrize("kind", KINDS)
def test_losses_are_those_of_one_process(kind: str, tiny: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    """Architectures that DeepSpeed cannot train without Footplate's patches: no number of KV heads in the config, a
    head_dim that is null, heads of queries larger than those of values, layers that need the heads apart, and mixtures
    whose second rank has only padding."""
    one, single = train_in_one_process(kind, tiny, fork_server, tmp_path)
    sharded = fork_server.train(tmp_path / "two", edit(one, SEQUENCE), 2)
    assert losses(sharded) == same_losses(losses(single), REORDERING_TOLERANCE)
    norms = [point["grad_norm"] for point in read_metrics(sharded)]
    assert len(norms) == 3 and all(norms)


@cites("STR056")
@pytest.mark.parametrize("kind", soak_except(("mistral", "bart"), ("mistral",)))
def test_refused_types_compute_other_losses(kind: str, tiny: Path, fork_server: ForkServer, tmp_path: Path) -> None:
    """Because a sliding window is shorter than the sequences, or positions start again on each rank. Without the rules,
    nothing fails."""
    one, single = train_in_one_process(kind, tiny, fork_server, tmp_path)
    two = edit(one, SEQUENCE)
    found = preflight(two, Machine(), tmp_path).findings
    assert {finding.code for finding in found} & {"STR047", "STR056"}
    code, log = skip_checks.run(tmp_path / "two", two, fork_server)
    assert code == 0, log
    assert losses(tmp_path / "two") != same_losses(losses(single), REORDERING_TOLERANCE)


def test_the_noise_does_not_depend_on_the_parts_of_a_sequence() -> None:
    """NEFTune's noise is divided by the root of the length, which is shorter on each rank."""
    largest, embedding = [], torch.nn.Embedding(2, 64).train()
    for ranks in (1, 4):
        engine: Any = SimpleNamespace(
            spec=edit(RunSpec(), {"train.neftune_noise_alpha": 5.0}), run=SimpleNamespace(token_shards=ranks)
        )
        embedding.neftune_noise_alpha = trainers._noise_alpha(engine)
        output = torch.zeros(1, 1024 // ranks, 64)
        largest.append(float(neftune_post_forward_hook(embedding, None, output).abs().max()))
    assert largest[1] == pytest.approx(largest[0], rel=1e-2)
    assert trainers._noise_alpha(SimpleNamespace(spec=RunSpec(), run=SimpleNamespace(token_shards=2))) is None  # type: ignore[arg-type]


def test_more_ranks_than_key_value_heads_change_no_layer() -> None:
    """Otherwise the evaluation, where each rank has all heads, fails."""
    attention = SimpleNamespace(
        disable_in_eval=True,
        world_size=4,
        required_query_shape=torch.Size([1, 1, 4, 8]),
        required_context_shape=torch.Size([1, 1, 8]),
    )

    def original(_: Any, module: Any, *__: Any) -> tuple[torch.Tensor, None]:
        module.num_key_value_groups = 1  # as deepspeed does
        return torch.zeros(1, 3, 32), None

    with_groups, without = torch.nn.Module(), torch.nn.Module()
    with_groups.num_key_value_groups = 2
    query, key = torch.zeros(1, 4, 3, 8), torch.zeros(1, 2, 3, 8)
    for module in (with_groups, without):
        ulysses_heads.SizedForward(original)(attention, module, query, key, key)
    assert with_groups.num_key_value_groups == 2
    assert not hasattr(without, "num_key_value_groups")


def train_in_one_process(kind: str, tiny: Path, fork_server: ForkServer, root: Path) -> tuple[RunSpec, Path]:
    """The spec, and the folder of its run, of a small model without dropout."""
    folder = save(build(kind), tiny, root / "model")
    config = json.loads((folder / "config.json").read_text())
    no_dropout = {name: 0.0 for name in config if name.endswith(("dropout", "pdrop"))}
    no_head_size = {"head_dim": None} if kind == "mixtral" else {}
    (folder / "config.json").write_text(json.dumps({**config, **no_dropout, **no_head_size}))
    spec = make_spec({**FULL, "model.source": "path", "model.path": str(folder)})
    return spec, fork_server.train(root / "one", spec)

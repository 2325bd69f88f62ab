"""What needs consent in a spec from another person: options and environment variables that can run code, or decide
where data is sent.

An import lists these with their values and leaves them out until the user agrees. Everything in launch.env needs
consent, except HARMLESS_VARIABLES: no list of dangerous variables would be complete.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from backend.config import RunSpec, variables
from backend.config.options import edit, get

ENV, TRUST = "launch.env", "model.trust_remote_code"
HARMLESS_VARIABLES = {
    "ACCELERATE_LOG_LEVEL", "ASCEND_RT_VISIBLE_DEVICES", "CUBLAS_WORKSPACE_CONFIG", "CUDA_DEVICE_MAX_CONNECTIONS",
    "CUDA_DEVICE_ORDER", "CUDA_LAUNCH_BLOCKING", "CUDA_MODULE_LOADING", "CUDA_VISIBLE_DEVICES", "DATASETS_VERBOSITY",
    "DIFFUSERS_VERBOSITY", "GOMP_CPU_AFFINITY", "HF_DATASETS_OFFLINE", "HF_HUB_DISABLE_PROGRESS_BARS",
    "HF_HUB_DISABLE_TELEMETRY", "HF_HUB_DISABLE_XET", "HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ENABLE_HF_TRANSFER",
    "HF_HUB_ETAG_TIMEOUT", "HF_HUB_OFFLINE", "HF_HUB_VERBOSITY", "HF_XET_HIGH_PERFORMANCE", "HIP_VISIBLE_DEVICES",
    "HSA_OVERRIDE_GFX_VERSION", "KMP_AFFINITY", "KMP_BLOCKTIME", "LANG", "LC_ALL", "MALLOC_ARENA_MAX", "MKL_DYNAMIC",
    "MKL_NUM_THREADS", "NCCL_ALGO", "NCCL_BUFFSIZE", "NCCL_CROSS_NIC", "NCCL_CUMEM_ENABLE", "NCCL_DEBUG",
    "NCCL_DEBUG_SUBSYS", "NCCL_IB_DISABLE", "NCCL_IB_GID_INDEX", "NCCL_IB_HCA", "NCCL_IB_QPS_PER_CONNECTION",
    "NCCL_IB_RETRY_CNT", "NCCL_IB_SL", "NCCL_IB_TC", "NCCL_IB_TIMEOUT", "NCCL_LAUNCH_MODE", "NCCL_MAX_CTAS",
    "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ",
    "NCCL_NSOCKS_PERTHREAD", "NCCL_NTHREADS", "NCCL_NVLS_ENABLE", "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_PROTO",
    "NCCL_SHM_DISABLE", "NCCL_SOCKET_NTHREADS", "NO_COLOR", "NUMEXPR_MAX_THREADS", "NUMEXPR_NUM_THREADS",
    "NVIDIA_TF32_OVERRIDE", "OMP_DYNAMIC", "OMP_NUM_THREADS", "OMP_PLACES", "OMP_PROC_BIND", "OMP_SCHEDULE",
    "OMP_WAIT_POLICY", "OPENBLAS_NUM_THREADS", "PYTHONDONTWRITEBYTECODE", "PYTHONFAULTHANDLER", "PYTHONHASHSEED",
    "PYTHONUNBUFFERED", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF",
    "PYTORCH_NO_CUDA_MEMORY_CACHING", "RAYON_NUM_THREADS", "ROCR_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "TORCH_CPP_LOG_LEVEL", "TORCH_CUDA_ARCH_LIST", "TORCH_DISTRIBUTED_DEBUG",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_AVOID_RECORD_STREAMS", "TORCH_NCCL_BLOCKING_WAIT",
    "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING", "TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC",
    "TORCH_NCCL_HIGH_PRIORITY", "TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_SHOW_CPP_STACKTRACES", "TQDM_DISABLE",
    "TRANSFORMERS_NO_ADVISORY_WARNINGS", "TRANSFORMERS_OFFLINE", "TRANSFORMERS_VERBOSITY", "WANDB_DISABLED",
    "WANDB_MODE", "WANDB_NAME", "WANDB_NOTES", "WANDB_PROJECT", "WANDB_RUN_GROUP", "WANDB_SILENT", "WANDB_TAGS",
    "WANDB_WATCH", "ZE_AFFINITY_MASK",
}  # fmt: skip
HARMLESS_VALUE = re.compile(r"[\w.,:;=^|@+*\[\] -]{0,500}")  # neither a path, nor an address, nor a shell command
OPTIONS = (
    # Programs, images, and what is executed before or around the training.
    "slurm.setup", "slurm.extra", "slurm.container", "slurm.container_mounts", "slurm.container_python", "ray.python",
    "kubernetes.image", "kubernetes.python", "kubernetes.volumes", "kubernetes.secret", "kubernetes.service_account",
    "kubernetes.kubeflow_runtime", "kubernetes.extra_pod_spec", "llamafactory.environment", "llamafactory.extra_args",
    # Hosts that the ranks trust: torchrun's and DeepSpeed's rendezvous are not authenticated, and partly pickled.
    "launch.master_addr", "launch.hostfile",
    # Checkpoints of DeepSpeed and FSDP are partly pickles.
    "save.resume_path",
)  # fmt: skip
EXTRA_CONFIG = ("launch.extra_accelerate_config", "parallel.extra_config")
# Words in the configuration of DeepSpeed, FSDP and accelerate that name neither a module, a file nor a program.
HARMLESS_WORDS = re.compile(
    r"(?i)auto|none|no|yes|true|false|cpu|cuda|nvme|off|on|fp32|fp16|fp8|bf16|no_shard|full_shard|hybrid_shard"
    r"|shard_grad_op|backward_pre|backward_post|no_prefetch|nccl|gloo|local_machine|multi_gpu|multi_cpu|fsdp|deepspeed"
    r"|(full|sharded|local)_state_dict|transformer_based_wrap|size_based_wrap|no_wrap|adamw?|lion|lamb|sgd"
    r"|adagrad|warmup(decay|cosine)?lr|onecyclelr|lrrangetest|linear|log|static|c10d|inductor|o[0-3]|"
)


@dataclass(frozen=True)
class Imported:
    """`spec` without the values that need consent, and `patch`, which sets these values: option -> value. `listed` has
    a line for each: "launch.env: LD_PRELOAD=/tmp/a.so"."""

    spec: RunSpec
    patch: Mapping[str, Any]
    listed: tuple[str, ...]


def unlisted_variables(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that can decide which code runs or where data is sent, as far as Footplate knows."""
    return [
        name for name, value in env.items() if name not in HARMLESS_VARIABLES or not HARMLESS_VALUE.fullmatch(value)
    ]


def without_consent(spec: RunSpec, base: RunSpec) -> Imported:
    """`spec`, but with the values of `base` where a different value needs consent. trust_remote_code is turned off and
    not in the patch: the next check would already execute files of a model folder."""
    patch: dict[str, Any] = {name: get(spec, name) for name in _options(spec, base)}
    kept: dict[str, Any] = {name: get(base, name) for name in patch}
    asked_for = dict(patch)
    for name in EXTRA_CONFIG:
        if name in patch and (parts := _parts(patch[name])):
            kept[name], asked_for[name] = parts[0] or kept[name], parts[1]
    listed = [f"{name}: {_shown(value)}" for name, value in asked_for.items()]
    env, known = spec.launch.env, base.launch.env
    if asked := [name for name in unlisted_variables(env) if known.get(name) != env[name]]:
        patch[ENV] = env
        kept[ENV] = {name: value for name, value in env.items() if name not in asked}
        masked = variables.masked(env)
        listed = [*(f"{ENV}: {name}={masked[name]}" for name in asked), *listed]
    if spec.model.trust_remote_code and not base.model.trust_remote_code:
        kept[TRUST] = False
        listed.append(f"{TRUST} (the file turns it on; it stays off here)")
    return Imported(edit(spec, kept), patch, tuple(listed))


def _options(spec: RunSpec, base: RunSpec) -> Iterator[str]:
    """The options that need consent and that `spec` sets differently, also those that are hidden: a later change of
    another option can make them effective."""
    for name in OPTIONS:
        if get(spec, name) != get(base, name):
            yield name
    for name in EXTRA_CONFIG:
        if get(spec, name) != get(base, name) and not _only_settings(get(spec, name)):
            yield name


def _parts(text: str) -> tuple[str, str] | None:
    """A JSON text in two parts: (top-level keys with nothing but settings, the other keys). None if it is not a JSON
    object."""
    with suppress(ValueError, RecursionError):
        table = json.loads(text)
        settings = {key: value for key, value in table.items() if _only_settings(json.dumps(value))}
        others = {key: value for key, value in table.items() if key not in settings}
        return json.dumps(settings, indent=2) if settings else "", json.dumps(others, indent=2)
    return None


def _only_settings(text: str) -> bool:
    """Whether a JSON text has only numbers, switches and HARMLESS_WORDS. Otherwise it may name a program or a module:
    accelerate launch takes any of its arguments from its configuration file."""
    with suppress(ValueError, RecursionError):
        return all(HARMLESS_WORDS.fullmatch(word) for word in _words(json.loads(text or "{}")))
    return False


def _words(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _words(part)
    elif isinstance(value, list):
        for part in value:
            yield from _words(part)


def _shown(value: Any) -> str:
    lines = value if isinstance(value, tuple) else (str(value),)
    return variables.hide_tokens("; ".join(lines))

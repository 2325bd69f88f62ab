"""The process of llama.cpp's server with one GGUF file. It imports nothing from Footplate: its only packages are those
of the environment gguf. stdin has one line of JSON, `model`, `key` and `context` (tokens); stdout gets the address.
Ends when stdin is closed.
"""

from __future__ import annotations

import json
import sys

import xllamacpp


def main() -> None:
    """Load the file, print the address, wait."""
    request = json.loads(sys.stdin.readline())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = request["model"]
    parameters.api_keys = [request["key"]]
    parameters.hostnames, parameters.port = ["127.0.0.1"], 0  # a free one
    parameters.ui, parameters.offline, parameters.warmup = False, True, False
    parameters.n_ctx, parameters.n_parallel, parameters.cache_ram_mib = request["context"], 1, 0
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = 1  # trainings need the others
    server = xllamacpp.Server(parameters)
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


if __name__ == "__main__":
    main()

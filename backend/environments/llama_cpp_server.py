"""The process of llama.cpp's server with one GGUF file (llama_cpp.py starts it). It imports nothing from Footplate: its
only packages are those of the environment gguf. stdin has one line of JSON, the settings; stdout gets the address. Ends
when stdin is closed, also during a request.
"""

from __future__ import annotations

import json
import os
import sys

import xllamacpp


def main() -> None:
    """Load the file, print the address, wait."""
    settings = json.loads(sys.stdin.readline())
    parameters = xllamacpp.CommonParams()
    parameters.model.path = settings["model"]
    parameters.model_alias = {settings["name"]} if settings["name"] else set()
    parameters.api_keys = [settings["key"]]
    parameters.hostnames, parameters.port = ["127.0.0.1"], settings["port"]
    # Serve only what OpenAI's clients need: no page, no state of requests, and no access for other web pages.
    parameters.ui = parameters.endpoint_slots = parameters.endpoint_metrics = parameters.endpoint_props = False
    parameters.cors_origins, parameters.cors_credentials = "", False
    parameters.verbosity = 1  # errors only: info messages contain the end of the key, warnings each request without one
    parameters.offline, parameters.warmup = True, False
    parameters.n_ctx = settings["context"] * settings["parallel"]  # the context of all slots together
    parameters.n_parallel, parameters.cache_ram_mib = settings["parallel"], 0
    parameters.default_template_kwargs = {key: json.dumps(value) for key, value in settings["template_kwargs"].items()}
    if settings["adapter"]:
        parameters.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(settings["adapter"], 1.0)]
    parameters.n_gpu_layers = 0
    parameters.cpuparams.n_threads = parameters.cpuparams_batch.n_threads = settings["threads"]
    try:
        server = xllamacpp.Server(parameters)
    except RuntimeError as error:  # llama.cpp has printed the reason
        sys.exit(str(error))
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
    os._exit(0)  # a normal exit would first finish all requests


if __name__ == "__main__":
    main()

"""In the place of the program vllm: parses its arguments as `vllm serve` does (tests/data/vllm_arguments.json), checks
every request, and has a second process, as vLLM's engine. A folder with the file `broken` cannot be loaded.

It is run by Python without site-packages, and applies the middleware that it is given.
"""

import argparse
import asyncio
import importlib
import json
import os
import re
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

ARGUMENTS = json.loads((Path(__file__).parents[1] / "data/vllm_arguments.json").read_text())
ARGUMENTS.pop("version")
TRAINED_CONTEXT = 8192
FAILURE = """\
(EngineCore pid=7) ERROR 11-29 11:07:50 [core.py:900] Traceback (most recent call last):
(EngineCore pid=7) ERROR 11-29 11:07:50 [core.py:900] ValueError: LoRA is not supported for this architecture.
(APIServer pid=6) RuntimeError: Engine core initialization failed. See root cause above.
"""


def kind_of(text):
    """One of the kinds of samples of record_vllm_arguments.py."""
    if text.startswith("{"):
        json.loads(text)
        return "object"
    if re.fullmatch(r"-?\d+", text):
        return "integer"
    return "decimal" if re.fullmatch(r"\d+\.\d+", text) else "auto" if text == "auto" else "word"


def convert(about):
    def check(text):
        if kind_of(text) not in about["accepts"]:
            raise ValueError(text)
        return text

    return check


def parsed(words):
    parser = argparse.ArgumentParser("vllm serve", allow_abbrev=False, add_help=False)
    parser.add_argument("model")
    for name, about in ARGUMENTS.items():
        if about["nargs"] == 0:
            parser.add_argument(name, action="store_true")
        elif "choices" in about:
            parser.add_argument(name, nargs=about["nargs"], choices=list(map(str, about["choices"])))
        else:
            parser.add_argument(name, nargs=about["nargs"], type=convert(about))
    assert words[0] == "serve"
    return vars(parser.parse_args(words[1:]))


def models(arguments):
    found = [{"id": arguments["served_model_name"][0], "max_model_len": context(arguments)}]
    for text in arguments["lora_modules"] or ():
        found.append({"id": json.loads(text)["name"], "parent": found[0]["id"], "max_model_len": None})
    return found


def context(arguments):
    return TRAINED_CONTEXT if arguments["max_model_len"] == "auto" else int(arguments["max_model_len"])


def answer(arguments, method, path, body):
    """Status and JSON of a request that has its token."""
    if (method, path) == ("GET", "/v1/models"):
        return 200, {"data": models(arguments)}
    if method != "POST" or path not in ("/v1/chat/completions", "/v1/completions"):
        return 404, {}
    asked = json.loads(body)
    if asked["model"] not in [model["id"] for model in models(arguments)]:
        return 404, {"error": {"message": f"The model {asked['model']} does not exist."}}
    if asked.get("tools"):
        return 400, {"error": {"message": '"auto" tool choice requires --enable-auto-tool-choice'}}
    if path == "/v1/completions":
        return 200, {"choices": [{"text": asked["prompt"]}]}
    assert [set(message) for message in asked["messages"]] == [{"role", "content"}] * len(asked["messages"])
    return 200, {"choices": [{"message": {"role": "assistant", "content": asked["messages"][-1]["content"]}}]}


def handler(arguments):
    module, _, name = arguments["middleware"].rpartition(".")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            found = {"status": 200, "body": b""}

            async def app(scope, _receive, send):
                path = scope["path"]
                status, reply = (200, {}) if path == "/health" else answer(arguments, self.command, path, body)
                await send({"status": status})
                await send({"body": json.dumps(reply).encode()})

            async def send(message):
                found.update(message)

            headers = [(key.lower().encode(), value.encode("latin1")) for key, value in self.headers.items()]
            scope = {"type": "http", "path": self.path.partition("?")[0], "headers": headers}
            asyncio.run(getattr(importlib.import_module(module), name)(app)(scope, None, send))
            self.send_response(found["status"])
            self.end_headers()
            self.wfile.write(found["body"])

        do_POST = do_GET

        def log_message(self, *_):
            pass

    return Handler


def main():
    arguments = parsed(sys.argv[1:])
    assert os.environ["VLLM_API_KEY"] and os.environ["VLLM_NO_USAGE_STATS"] == "1"
    assert not {"PYTHONHOME", "FOOTPLATE_SERVE_TOKEN"} & os.environ.keys()
    for folder in [arguments["model"], *(json.loads(text)["path"] for text in arguments["lora_modules"] or ())]:
        assert Path(folder, "config.json").is_file() or Path(folder, "adapter_config.json").is_file(), folder
        if Path(folder, "broken").exists():
            sys.exit(FAILURE.strip())
    Path("arguments.json").write_text(json.dumps([*sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"]]))
    try:
        server = ThreadingHTTPServer((arguments["host"], int(arguments["port"])), handler(arguments))
    except OSError as error:
        sys.exit(f"OSError: {error}")
    if not os.fork():  # the engine, which a SIGTERM to its parent does not end
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True:
            signal.pause()
    server.serve_forever()


if __name__ == "__main__":
    main()

"""In the place of the package xllamacpp: records every argument, answers one route, and crashes if it is told to."""

import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

TRAINED_CONTEXT = 8192


class CommonParams:
    """Takes any attribute."""

    def __init__(self):
        self.model, self.cpuparams, self.cpuparams_batch = SimpleNamespace(), SimpleNamespace(), SimpleNamespace()


def as_json(value):
    return sorted(value) if isinstance(value, set) else vars(value)


class Server:
    """Serves in a thread, as llama.cpp's does."""

    def __init__(self, parameters):
        content = Path(parameters.model.path).read_text()
        Path("arguments.json").write_text(json.dumps(vars(parameters), default=as_json))
        if content == "broken":
            sys.stderr.write("0.00.1 E load: error loading model:  tensor x\n0.00.2 E srv    init: exiting\n")
            raise RuntimeError("Failed to init server, please check the input params.")
        context = min(parameters.n_ctx // parameters.n_parallel, TRAINED_CONTEXT)

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                allowed = self.headers["Authorization"] == f"Bearer {parameters.api_keys[0]}"
                if self.path == "/crash" and allowed:
                    sys.stderr.write("GGML_ASSERT(false) failed\n")
                    sys.stderr.flush()
                    os.abort()
                body = {"data": [{"id": "m", "meta": {"n_ctx": context, "n_ctx_train": TRAINED_CONTEXT}}]}
                if self.path == "/props":
                    body = {"chat_template_caps": {"supports_tools": True}}
                self.send_response(200 if allowed else 401)
                self.end_headers()
                self.wfile.write(json.dumps(body if allowed else {"error": {}}).encode())

            def log_message(self, *_):
                pass

        try:
            server = ThreadingHTTPServer((parameters.hostnames[0], parameters.port), Handler)
        except OSError:
            sys.stderr.write("0.00.1 E srv start: couldn't bind HTTP server socket, hostname: 127.0.0.1\n")
            raise RuntimeError("Failed to init server, please check the input params.") from None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.listening_address = f"http://127.0.0.1:{server.server_port}"

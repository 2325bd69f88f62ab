"""Stands in for the process of a chat: it answers each prompt with its words, one after the other."""

import json
import time
from pathlib import Path

from backend.models import chat_files
from backend.models.chat_files import GENERATE, OUTPUTS, REQUESTS, STOP, Lines

HERE = Path()
HTML = "<b onclick=alert(1)>bold</b>"


def main():
    facts = {"seconds": 14.2, "bytes": 2**30, "tools": True, "thinking": "enable_thinking"}
    (HERE / "loaded.json").write_text(json.dumps(facts))
    (HERE / "progress.json").write_text(json.dumps({"phase": "chat", "text": "The chat is ready."}))
    requests, waiting, stopped = Lines(HERE / REQUESTS), [], set()
    ended = {(line.get("id"), line.get("side")) for line in Lines(HERE / OUTPUTS).read() if "end" in line}

    def poll():
        for request in map(chat_files.parse, requests.read()):
            if request.kind == GENERATE and not all((request.id, side) in ended for side in request.sides):
                waiting.append(request)
            elif request.kind == STOP:
                stopped.add(request.target)

    def write(request, side, **values):
        chat_files.append(HERE / OUTPUTS, {"id": request.id, "side": side, **values})

    while not (HERE / "stop").exists():
        poll()
        time.sleep(0.02)
        for request in waiting:
            for side in request.sides:
                answer(request, side, write, lambda id: poll() or id in stopped)
        waiting.clear()
    (HERE / "result.json").write_text(json.dumps({"text": "The chat was stopped."}))


def answer(request, side, write, is_stopped):
    write(request, side, begin=1)
    if request.prompt == "fail":
        write(request, side, end="error", error="Generation failed: on purpose.", text="")
        return
    words = [f"{side} ", HTML, *(f" {word}" for word in request.prompt.split())]
    if request.template_kwargs.get("enable_thinking"):
        words = ["<think>\n", "because", "\n</think>\n", *words]
    done = []
    while (len(done) < len(words) or request.prompt == "endless") and not is_stopped(request.id):
        done.append(words[len(done)] if len(done) < len(words) else " more")
        write(request, side, text=done[-1])
        time.sleep(0.02)
    messages = [{"role": request.role, "content": request.prompt}]
    details = {
        "prompt": "P",
        "messages": messages,
        "is_plain": True,
        "prompt_tokens": [[1, "<|im_start|>user"]],
        "tokens": [[2, word, 0.5] for word in done],
    }
    chat_files.append(HERE / OUTPUTS, {"details": [request.id, side], **details})
    end = {"end": "stopped"} if request.prompt == "endless" else {"end": "stop token", "stop": "<|im_end|>"}
    write(request, side, **end, text="".join(done), tokens=len(done), seconds=3.14, limit=request.max_new_tokens)


main()

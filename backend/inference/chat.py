"""The process of a chat: answers the requests in its folder, one after the other, until no client is left. One thread:
peft's `disable_adapter()` is global, so two generations at once would both come from the base model. Requests are read
after each token, so that a stop is noticed at once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from pathlib import Path
from typing import Any

import psutil
import torch

from backend.inference import chat_prompt, generation
from backend.inference.loading import Loaded, Models
from backend.models import chat, chat_files, conversation, trained
from backend.models.chat_files import GENERATE, LOADED, OUTPUTS, REQUESTS, STOP, TUNED, Lines, Request
from backend.runs import RESULT, jobs, queue
from backend.runs.files import write_json
from backend.runs.folder import Run
from backend.train import device
from backend.train.completion_start import SWITCHES
from backend.train.run_log import RunLog, TrainError
from backend.train.templates import ChatTokenizer, UnsupportedConversation
from backend.wording import counted

POLL_SECONDS = 0.05
NICENESS = 5  # on a CPU, where runs may be training at the same time
CHECK_SECONDS = 1.0  # between two checks of clients and queue
LOADING, READY = "loading model", "chat"  # phases of the job
SIDE_NAMES = {"trained": "trained model", "base": "base model"}


class Chat:
    """The chat in `folder`, which is that of a job of the run."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, Run(folder)
        self.log = RunLog(folder)
        self.models = Models(Run(self.job.path.parent.parent), self._loading)
        self.idle_seconds = _idle_seconds(folder)
        self.devices = set(self.job.plan().devices)
        if not self.devices:
            os.setpriority(os.PRIO_PROCESS, 0, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
        self.requests = Lines(folder / REQUESTS)
        self.all: list[Request] = []
        self.waiting: deque[Request] = deque()
        self.stopped: set[str] = set()
        self.checked, self.active = 0.0, time.time()
        self.started, self.count = time.time(), 0
        self.is_described = False  # whether LOADED was written
        self.reason = ""  # why the process ends

    def serve(self) -> None:
        """Answer requests until the chat ends, and write its result."""
        ended = {(line.get("id"), line.get("side")) for line in self._outputs() if "end" in line}
        self._poll()
        self.waiting = deque(r for r in self.waiting if not all((r.id, side) in ended for side in r.sides))
        if not self.waiting:
            self._preload()
            self.log.start_phase(READY, "The chat is ready.")
        while not self._ends():
            self._poll()
            if self.waiting:
                self._answer(self.waiting.popleft())
                self.active = time.time()
            else:
                time.sleep(POLL_SECONDS)
        self._poll()
        for request in self.waiting:
            for side in request.sides:
                self._end(request, side, end=generation.STOPPED, text="")
        seconds = round(time.time() - self.started, 1)
        write_json(self.folder / RESULT, {"text": self.reason, "outputs": self.count, "seconds": seconds})
        self.log.info(self.reason)

    def _outputs(self) -> list[dict[str, Any]]:
        return Lines(self.folder / OUTPUTS, chat_files.DETAILS).read()

    def _loading(self, text: str) -> None:
        self.log.start_phase(LOADING, text)

    def _preload(self) -> None:
        """Load the newest model before the first request. Raises TrainError if that is not possible."""
        found = trained.models(self.models.run)
        if not found:
            raise TrainError("This run no longer has a model that can be loaded.")
        self._load(found[0].step, TUNED)

    def _load(self, step: int | None, side: str) -> Loaded:
        """A model that is ready. For the first one, write how long the start took, and what its template reads."""
        loaded = self.models.load(step, side)
        if not self.is_described:
            self.is_described = True
            reads = frozenset[str]()
            if self.models.mode(step) == chat.CHAT:
                template = self._template(loaded)
                reads = template.input.variables | template.of({"tools": True}).input.variables
            facts = {
                "seconds": round(time.time() - psutil.Process().create_time(), 1),
                "bytes": device.memory_bytes(self.models.device),
                "device": self.models.device,
                "tools": "tools" in reads,
                "thinking": next((name for name in SWITCHES if name in reads), ""),
            }
            write_json(self.folder / LOADED, facts)
        return loaded

    # -- when it ends --------------------------------------------------------------------------------------------------

    def _ends(self) -> bool:
        """Whether the chat ends now; the reason is kept. Called between two outputs."""
        if self.log.stop_requested():
            self.reason = "The chat was stopped."
        elif time.monotonic() - self.checked >= CHECK_SECONDS:
            self.checked = time.monotonic()
            self.reason = self._waiting_run() or self._idle()
        return bool(self.reason)

    def _idle(self) -> str:
        seen = max(self.active, chat_files.last_sign(self.folder))
        if self.waiting or time.time() - seen < self.idle_seconds:
            return ""
        return f"The chat ended because nobody used it for {_duration(self.idle_seconds)}."

    def _waiting_run(self) -> str:
        """Why the chat ends if a run in the queue waits for its device, since runs come first; '' if none does. The
        reason of a waiting run says who holds the device."""
        if not self.devices:
            return ""
        own = Run(self.folder)  # it may have been renamed
        with contextlib.suppress(OSError):
            for entry in queue.entries():
                waits = not entry.held and self.devices & set(entry.devices) and entry.run != str(own.path)
                if waits and own.id in Run(Path(entry.run)).waiting()["reason"]:
                    device = next(label for name, label in entry.devices.items() if name in self.devices)
                    return f"The chat ended because {entry.id} was waiting for {device}."
        return ""

    # -- requests ------------------------------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Read new requests."""
        for value in self.requests.read():
            request = chat_files.parse(value)
            if request is None:
                continue
            self.active = max(self.active, time.time())
            self.all.append(request)
            if request.kind == GENERATE:
                self.waiting.append(request)
            elif request.kind == STOP:
                self.stopped.add(request.target)

    def _answer(self, request: Request) -> None:
        """Generate the outputs of a request."""
        so_far = chat_files.turns(self.all, self._outputs(), request.conversation)
        number = next((n for n, turn in enumerate(so_far) if turn.request.id == request.id), None)
        before = so_far[:number] if number and request.history else []
        for side in request.sides:
            if number is None or self._is_stopped(request):  # cleared or replaced meanwhile
                self._end(request, side, end=generation.STOPPED, text="")
                continue
            try:
                self._generate(request, side, before)
            except (TrainError, UnsupportedConversation) as error:
                text = str(error)
                self._fail(request, side, text if isinstance(error, TrainError) else f"The conversation {text}.")
            except torch.OutOfMemoryError:
                self._fail(
                    request, side, "The device ran out of memory. Shorten the prompt, or clear the conversation."
                )
            except Exception as error:  # any error of the model's code; the next request may succeed
                self._fail(request, side, f"Generation failed: {(str(error).splitlines() or [repr(error)])[0]}")
        self.log.progress(READY)

    def _is_stopped(self, request: Request) -> bool:
        """Whether a generation should end now; called after each token."""
        self._poll()
        return request.id in self.stopped or bool(self.log.stop_requested())

    def _generate(self, request: Request, side: str, before: list[chat_files.Turn]) -> None:
        self.models.run = Run(Run(self.folder).path.parent.parent)  # it may have been renamed
        loaded = self._load(request.step, side)
        mode = self.models.mode(request.step)
        if mode == chat.SCORE:
            self._begin(request, side)
            self._score(request, side, loaded)
            return
        self.log.progress(READY, f"Generating with the {SIDE_NAMES[side]}.")
        details: dict[str, Any] = {"prompt": request.prompt}
        if mode == chat.CHAT:
            template = self._template(loaded)
            details = chat_prompt.render(self.models.spec, template, request, side, before)
            ids = template.ids(details["prompt"])
        else:
            chat_prompt.refuse_tools(request, "This model continues texts and has no chat template")
            ids, adds_eos = generation.text_ids(loaded.tokenizer, request.prompt)
            details |= {"adds_eos": adds_eos}
        opened = conversation.opened_by(details["prompt"])
        self._begin(request, side, **({"opened": opened} if opened else {}))

        def report(text: str) -> None:
            chat_files.append(self.folder / OUTPUTS, {"id": request.id, "side": side, "text": text})

        output = generation.generate(loaded, ids, request, report, lambda: self._is_stopped(request))
        stops = sorted(generation.stop_tokens(loaded))
        self._finish(request, side, loaded, {**details, "stops": stops, "opened": opened}, ids, output)

    def _begin(self, request: Request, side: str, **values: Any) -> None:
        chat_files.append(self.folder / OUTPUTS, {"id": request.id, "side": side, "begin": time.time(), **values})

    def _template(self, loaded: Loaded) -> ChatTokenizer:
        return ChatTokenizer.create(loaded.tokenizer, True, self.models.spec.data.template_kwargs)

    def _score(self, request: Request, side: str, loaded: Loaded) -> None:
        """Score the two answers of a request with a reward model."""
        if len(request.answers) != 2:
            raise TrainError("A reward model scores exactly two completions of a prompt.")
        template, started = self._template(loaded), time.monotonic()
        prompt = chat_prompt.messages(self.models.spec, request, side, [])
        answers = [[{"role": "assistant", "content": answer}] for answer in request.answers]
        shared, completions = template.tokenize_completions(prompt, answers)
        with loaded.active() as model:
            scores = [
                float(model(input_ids=torch.tensor([[*shared, *ids]], device=model.device)).logits[0, 0])
                for ids in completions
            ]
        self._end(request, side, end="scored", text="", scores=scores, seconds=round(time.monotonic() - started, 3))

    # -- outputs -------------------------------------------------------------------------------------------------------

    def _finish(
        self, request: Request, side: str, loaded: Loaded, rendered: Any, ids: list[int], output: generation.Output
    ) -> None:
        """Write the tokens of an output and its end; `rendered`: the prompt, and what it was made of."""
        tokenizer = loaded.tokenizer
        tokens = zip(output.ids, generation.pieces(tokenizer, output.ids), output.probabilities, strict=True)
        details = {
            "details": [request.id, side],
            **rendered,
            "prompt_tokens": list(zip(ids, generation.pieces(tokenizer, ids), strict=True)),
            "tokens": [(token, text, round(probability, 6)) for token, text, probability in tokens],
        }
        chat_files.append(self.folder / OUTPUTS, details)
        text, whole = generation.text_of(tokenizer, output), generation.text_of(tokenizer, output, special=True)
        more = {"opened": rendered["opened"]} if rendered["opened"] else {}
        speed = len(output.ids) / output.seconds if output.seconds else 0.0
        self._end(
            request, side,
            end=output.end, stop=output.stop, limit=output.limit, seed=output.seed,
            text=text, **({"written": whole} if whole != text else {}), **more,
            tokens=len(output.ids), prompt_tokens=len(ids),
            seconds=round(output.seconds, 3), tokens_per_second=round(speed, 2),
        )  # fmt: skip
        made = f"{counted(len(output.ids), 'token')} in {output.seconds:.1f} s"
        self.log.info(f"The {SIDE_NAMES[side]} generated {made}.")

    def _fail(self, request: Request, side: str, sentence: str) -> None:
        self.log.info(sentence)
        self._end(request, side, end="error", error=sentence, text="")

    def _end(self, request: Request, side: str, **values: Any) -> None:
        self.count += 1
        chat_files.append(self.folder / OUTPUTS, {"id": request.id, "side": side, "step": request.step, **values})


def _idle_seconds(folder: Path) -> float:
    try:
        return float(jobs.request(folder, jobs.CHAT)["idle_seconds"])
    except (ValueError, TypeError, KeyError):
        return chat.IDLE_SECONDS


def _duration(seconds: float) -> str:
    return counted(round(seconds / 60), "minute") if seconds >= 60 else counted(round(seconds), "second")

"""The trained model as a zip file that is made while it is sent: it may be larger than the free disk space or
memory."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from starlette.responses import Response, StreamingResponse

from backend.models import trained
from webui.api.requests import ApiError
from webui.api.runs import PathRun, disposition

BLOCK = 2**20


class _Sent:
    """A file that keeps what was written until it is sent."""

    def __init__(self) -> None:
        self.blocks: list[bytes] = []

    def write(self, block: bytes) -> int:
        self.blocks.append(bytes(block))
        return len(block)

    def flush(self) -> None: ...

    def take(self) -> bytes:
        taken = b"".join(self.blocks)
        self.blocks.clear()
        return taken


def model_zip(run: PathRun) -> Response:
    """The weights, configuration and tokenizer in a zip file."""
    model = trained.find(run)
    if not model:
        raise ApiError(404, "This run has no model that can be downloaded yet.")
    return model_response(model, f"{run.id}-model" if model.step is None else f"{run.id}-checkpoint-{model.step}")


def model_response(model: trained.TrainedModel, name: str) -> Response:
    """The files of a model in a zip file of this name. Raises ApiError."""
    for path in model.folder.rglob("*"):
        if path.is_symlink():  # it may lead to a file that the trainer did not write
            raise ApiError(409, f"{path} is a symbolic link: replace it with the file to download the model.")
    blocks, headers = zipped(model.folder, model.files(), name), disposition(f"{name}.zip", "attachment")
    return StreamingResponse(blocks, media_type="application/zip", headers=headers)


def _without_links(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW)


def zipped(folder: Path, files: list[Path], name: str) -> Iterator[bytes]:
    """The blocks of a zip file with these files below the folder `name`. Nothing is compressed, since weights hardly
    shrink."""
    sent: Any = _Sent()
    with zipfile.ZipFile(sent, "w", zipfile.ZIP_STORED) as archive:
        for file in files:
            inside = f"{name}/{file.relative_to(folder)}"
            info = zipfile.ZipInfo.from_file(file, inside, strict_timestamps=False)  # a zip file has none before 1980
            with open(file, "rb", opener=_without_links) as source, archive.open(info, "w", force_zip64=True) as target:
                while block := source.read(BLOCK):
                    target.write(block)
                    yield sent.take()
    yield sent.take()

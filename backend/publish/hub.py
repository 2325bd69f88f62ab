"""Publishing to the Hugging Face Hub with huggingface_hub, in a process of its own: the library has no time limit for a
whole upload, and reads its settings when it is imported.

The library itself finds the token, in the environment or where `hf auth login` has stored it; no message contains it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi, constants, errors, get_token
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled, RepositoryNotFoundError

from backend.publish.contents import Contents, PublishedFile
from backend.wording import counted

Report = Callable[[str, float], None]  # (text, fraction of the bytes that are there)
TOKEN = re.compile(r"[\x21-\x7e]+")
TOKENS = f"{constants.ENDPOINT}/settings/tokens"
STORE = "with hf auth login, or on the page (Hugging Face token below Hub model ID)"
MESSAGE = "Publish with Footplate"
LARGE = 2**20  # bytes
AGAIN = "Publish again later: files that are there already are not sent again."


class PublishError(Exception):
    """Why the model is not published, and how to fix it, in one or two sentences without a token."""


def state(repository: str, public: bool) -> dict[str, Any]:
    """What a publication would find: `repository` with its account, `exists`, and the `commit` and the `files` of one
    that exists. Raises PublishError if the account cannot write there, or the visibility differs."""
    with _plain_errors(repository):
        token = _token()
        known = HfApi().whoami(token)
        account, access = str(known["name"]), known.get("auth", {}).get("accessToken", {})
        if access.get("role") == "read":
            raise PublishError(
                f"The Hugging Face token of the account {account} can only read. Create a token that can write at "
                f"{TOKENS}, and store it {STORE}."
            )
        full = repository if "/" in repository else f"{account}/{repository}"
        owners = [account, *(str(each["name"]) for each in known.get("orgs") or ())]
        if full.partition("/")[0] not in owners:
            raise PublishError(
                f"The account {account} cannot write to {full}. Choose a name that begins with one of: "
                f"{', '.join(f'{owner}/' for owner in owners)}."
            )
        try:
            info = HfApi().model_info(full, token=token)
        except RepositoryNotFoundError:
            return {"repository": full, "exists": False, "commit": "", "files": []}
    if bool(info.private) == public:
        raise PublishError(_visibility_problem(full, public))
    files = sorted(each.rfilename for each in info.siblings or ())
    return {"repository": full, "exists": True, "commit": info.sha or "", "files": files}


def _visibility_problem(repository: str, public: bool) -> str:
    settings = f"{constants.ENDPOINT}/{repository}/settings"
    if public:
        return (
            f"{repository} exists and is private, and a publication does not change that. Publish it as private, or "
            f"change its visibility first, at {settings}."
        )
    return (
        f"{repository} exists and is public, so everybody could read the model. Publish it as public (--public), "
        f"choose another name, or change its visibility first, at {settings}."
    )


def publish(contents: Contents, repository: str, public: bool, report: Report) -> dict[str, Any]:
    """Create the repository if there is none, and upload the files in one commit. Returns the addresses of repository
    and commit, and whether anything had changed. Files whose hash the Hub knows already are not sent. Raises
    PublishError and RunError."""
    report(f"Looking up {repository} on the Hub.", 0.0)
    found = state(repository, public)
    contents.check_repository(found["repository"], found["files"])
    api, token, name = HfApi(), _token(), str(found["repository"])
    with _plain_errors(name):
        if not found["exists"]:
            api.create_repo(name, private=not public, token=token)
        report(f"Computing the hashes of {counted(len(contents.files), 'file')}.", 0.0)
        operations = {file.name: _operation(file) for file in contents.files}
        done = 0
        for file in contents.files:  # large ones first, one by one, to show the progress; the commit sends the others
            if file.bytes >= LARGE:
                report(f"Uploading {file.name}.", done / contents.bytes)
                api.preupload_lfs_files(name, [operations[file.name]], token=token, free_memory=False)
            done += file.bytes
        report(f"Committing {counted(len(contents.files), 'file')}.", 1.0)
        commit = api.create_commit(name, list(operations.values()), commit_message=MESSAGE, token=token)
    return {
        "repository": name,
        "url": f"{constants.ENDPOINT}/{name}",
        "commit": commit.oid,
        "commit_url": commit.commit_url,
        "is_unchanged": commit.oid == found["commit"],
    }


def _operation(file: PublishedFile) -> CommitOperationAdd:
    content: str | Path | bytes = file.source if file.text is None else file.text.encode()
    return CommitOperationAdd(path_in_repo=file.name, path_or_fileobj=content)


def _token() -> str:
    token = get_token()
    if not token:
        raise PublishError(
            f"There is no Hugging Face token. Create one that can write at {TOKENS}, and store it {STORE}."
        )
    if not TOKEN.fullmatch(token):  # the HTTP library's error would quote it
        raise PublishError(
            "The Hugging Face token contains a space, a control character or a character outside of ASCII. Copy it "
            f"again from {TOKENS}, and store it {STORE}."
        )
    return token


# -- errors ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _plain_errors(repository: str) -> Iterator[None]:
    """Turn the library's errors into PublishError."""
    try:
        yield
    except OfflineModeIsEnabled as error:
        raise PublishError(
            "The Hub is not used, because HF_HUB_OFFLINE is set in the environment of Footplate. Unset it, or publish "
            "to a folder."
        ) from error
    except (errors.HTTPError, RuntimeError) as error:  # an upload's error is the cause of a RuntimeError
        cause = error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error
        if isinstance(cause, HfHubHTTPError):
            raise PublishError(_refusal(cause, repository)) from error
        raise PublishError(
            f"The connection to {constants.ENDPOINT} failed ({_line(cause) or type(cause).__name__}). {AGAIN}"
        ) from error
    except (ValueError, LookupError, TypeError) as error:  # the model card is invalid, or this is not the Hub
        raise PublishError(
            f"{constants.ENDPOINT} did not accept the request, or is not a Hugging Face Hub ({_line(error)}). If "
            "HF_ENDPOINT is set in the environment of Footplate, check it."
        ) from error


def _refusal(error: HfHubHTTPError, repository: str) -> str:
    status, said = error.response.status_code, (error.server_message or "").strip().rstrip(".")
    answer = f"{status}: {_line(said)}" if said else str(status)
    if status == 402 or "storage" in said.lower() or "quota" in said.lower():
        return (
            f"The account has no storage left for {repository} ({answer}). On the Hub, free some, or change the plan."
        )
    if status == 401:
        return (
            f"The Hub does not accept the Hugging Face token: it has expired or was revoked. Create one that can write "
            f"at {TOKENS}, and store it {STORE}."
        )
    if status in (403, 404):
        return (
            f"The token's account cannot write to {repository} ({answer}). Choose another name, or a token with write "
            f"permission for it: {TOKENS}."
        )
    if status == 429:
        return f"The Hub limits the number of requests ({answer}). Publish again in a few minutes."
    return f"The Hub answered with status {answer}. {AGAIN}"


def _line(error: object) -> str:
    return " ".join(str(error).split())[:300]

"""The child process of hub_token.py: stores a token or asks the Hub about one, with huggingface_hub's own functions.

The token comes through stdin, because other users can read command lines. A child, because huggingface_hub has no time
limit for a whole request, and reads its settings when it is imported.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from huggingface_hub import auth_check, constants, errors, get_token, login, utils, whoami
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")  # as huggingface_hub/utils/_auth.py of 2.4 reads them


def main(action: str, model: str) -> dict[str, str]:
    """What is known about the token after `action`, which is state, test or store; see hub_token.MESSAGES."""
    variable = next((name for name in VARIABLES if os.environ.get(name, "").strip()), "")
    known = {"variable": variable, "path": constants.HF_TOKEN_PATH, "endpoint": constants.ENDPOINT, "stored": ""}
    if action != "state":
        known |= _outcome(action, sys.stdin.read(), model)
    return known | {"token_file": "yes" if Path(constants.HF_TOKEN_PATH).is_file() else ""}


def _outcome(action: str, given: str, model: str) -> dict[str, str]:
    """The outcome of `action` for the given token, or else for the one that runs use."""
    token = given or get_token()
    if not token:
        return {"outcome": "no_token"}
    if token.startswith("api_org"):
        return {"outcome": "organization"}  # login refuses it
    found: dict[str, str] = {}
    try:
        _ask(action, token, model, found)
    except HfHubHTTPError as error:
        return found | _refusal(error, bool(found.get("account")))
    except OfflineModeIsEnabled:
        return found | {"outcome": "offline"}
    except errors.HTTPError as error:  # of the HTTP library that huggingface_hub uses
        return found | {"outcome": "no_network", "reason": str(error) or type(error).__name__}
    except HFValidationError:
        return found | {"outcome": "invalid_id"}
    except OSError as error:
        return found | {"outcome": "not_written", "reason": f"{error.filename}: {error.strerror}"}
    except (ValueError, KeyError, TypeError) as error:
        return found | {"outcome": "not_the_hub", "reason": type(error).__name__}
    return found | {"outcome": "ok"}


def _ask(action: str, token: str, model: str, found: dict[str, str]) -> None:
    """Store the token if that is the action; then ask for its account, and whether that account may read the model."""
    if action == "store":
        login(token, add_to_git_credential=False)  # asks the Hub first, and stores only what it accepts
        found["stored"] = "yes"
    found["account"] = whoami(token)["name"]
    if model:
        utils.validate_repo_id(model)  # auth_check of 2.4 does not check it
        auth_check(model, token=token)


def _refusal(error: HfHubHTTPError, is_known: bool) -> dict[str, str]:
    """The outcome of an error response; `is_known`: the Hub has already named the account of the token."""
    status = error.response.status_code
    if not is_known and status == 401:
        return {"outcome": "bad_token"}
    if isinstance(error, GatedRepoError) or (is_known and status == 403):
        return {"outcome": "no_access"}
    if isinstance(error, RepositoryNotFoundError):
        return {"outcome": "not_found"}
    return {"outcome": "status", "reason": str(status)}


if __name__ == "__main__":
    json.dump(main(*sys.argv[1:3]), sys.stdout)

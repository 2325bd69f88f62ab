"""The tokens and labels that LLaMA-Factory and axolotl make of some conversations, for test_token_parity.py.

    PYTHONPATH=. python tests/process/foreign_labels.py --env FOLDER

writes them anew into foreign_labels.json. FOLDER is a virtual environment with one of the programs: that of
`footplate env create llamafactory`, or one with

    pip install --no-deps axolotl==0.19.0 addict transformers==5.16.1 tokenizers==0.23.1 huggingface_hub==1.17.0 \\
        datasets==4.8.4

since axolotl's own preparation needs no other of its packages. What an environment lacks is taken from the one that
runs this script. The programs run only their preparation of data; nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from importlib import metadata, util
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).with_suffix(".json")
# The chat template that Footplate and axolotl use -> LLaMA-Factory's name for it.
TEMPLATES = {"chatml": "chatml", "llama3": "llama3", "qwen2_5": "qwen", "qwen3": "qwen3"}
ENDS = {"llama3": "<|eot_id|>"}  # the token that ends a turn; of the others, <|im_end|>
LENGTH, SHORT = 4096, 32  # the maximum sequence length, and that of the case "cut"
SYSTEM = {"role": "system", "content": "Name a time."}
TURNS = [
    {"role": "user", "content": "Next IC to Bern?"},
    {"role": "assistant", "content": "At nine."},
    {"role": "user", "content": "And to Biel?"},
    {"role": "assistant", "content": "At ten 🚆."},
]
THOUGHT = {"role": "assistant", "content": "<think>\nThe IC leaves at nine.\n</think>\n\nAt nine."}
FUNCTION = {"name": "timetable", "arguments": {"to": "Bern"}}
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": FUNCTION}]}
CALLING = [TURNS[0], CALL, {"role": "tool", "content": "9:00"}, TURNS[1]]
PARAMETERS = {"type": "object", "properties": {"to": {"type": "string"}}, "required": ["to"]}
TOOL = {"type": "function", "function": {"name": "timetable", "description": "Trains.", "parameters": PARAMETERS}}
ROLES = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
# Rows as axolotl reads them.
ROWS: dict[str, dict[str, Any]] = {
    "one": {"messages": TURNS[:2]},
    "two": {"messages": [SYSTEM, *TURNS]},
    "reasoning": {"messages": [TURNS[0], THOUGHT]},
    "earlier_reasoning": {"messages": [TURNS[0], THOUGHT, *TURNS[2:]]},
    "call": {"messages": CALLING, "tools": [TOOL]},
    "cut": {"messages": [TURNS[0], {"role": "assistant", "content": "At nine, at ten, at eleven and at noon."}]},
}
PAIR = {"from": "gpt", "value": "At nine."}, {"from": "gpt", "value": "No."}


def shared(turn: dict[str, Any]) -> dict[str, str]:
    """A turn in ShareGPT's form, which LLaMA-Factory reads."""
    if calls := turn.get("tool_calls"):
        return {"from": "function_call", "value": json.dumps([call["function"] for call in calls])}
    return {"from": ROLES[turn["role"]], "value": turn["content"]}


def rows_for(program: str) -> dict[str, dict[str, Any]]:
    """The rows as a program reads them, by the name of the case. Footplate reads the same."""
    if program == "axolotl":
        return {case: row for case, row in ROWS.items() if case != "cut"}  # axolotl drops long examples
    found: dict[str, dict[str, Any]] = {}
    for case, row in ROWS.items():
        found[case] = {"conversations": [shared(turn) for turn in row["messages"]]}
        if "tools" in row:
            found[case]["tools"] = json.dumps([tool["function"] for tool in row["tools"]])
    return found | {"pair": {"conversations": [shared(TURNS[0])], "chosen": PAIR[0], "rejected": PAIR[1]}}


def length_of(case: str) -> int:
    return SHORT if case == "cut" else LENGTH


def is_recorded(template: str, case: str) -> bool:
    """Whether the case has something to show with the template."""
    only = {"reasoning": ("qwen3",), "earlier_reasoning": ("qwen3",), "call": ("qwen2_5", "qwen3"), "cut": ("chatml",)}
    return template in only.get(case, TEMPLATES)


def labels_of_llamafactory(tokenizer: Any, template: str, case: str, row: dict[str, Any]) -> list[Any]:
    """(ids, labels) of the sequences that its processors make of a row."""
    from llamafactory.data.converter import SharegptDatasetConverter  # noqa: PLC0415
    from llamafactory.data.parser import DatasetAttr  # noqa: PLC0415
    from llamafactory.data.processor.pairwise import PairwiseDatasetProcessor  # noqa: PLC0415
    from llamafactory.data.processor.supervised import SupervisedDatasetProcessor  # noqa: PLC0415
    from llamafactory.data.template import get_template_and_fix_tokenizer  # noqa: PLC0415
    from llamafactory.hparams import DataArguments  # noqa: PLC0415

    arguments = DataArguments(template=TEMPLATES[template], cutoff_len=length_of(case))
    chosen = get_template_and_fix_tokenizer(tokenizer, arguments)
    is_pair = "chosen" in row
    columns = {"chosen": "chosen", "rejected": "rejected"} if is_pair else {}
    about = DatasetAttr("file", case, formatting="sharegpt", ranking=is_pair, **columns)
    about.tools = "tools" if "tools" in row else None
    aligned = SharegptDatasetConverter(about, arguments)(row)
    kind = PairwiseDatasetProcessor if is_pair else SupervisedDatasetProcessor
    made = kind(chosen, tokenizer, None, arguments).preprocess_dataset({key: [part] for key, part in aligned.items()})
    sides = ("chosen_", "rejected_") if is_pair else ("",)
    return [(made[f"{side}input_ids"][0], made[f"{side}labels"][0]) for side in sides]


def labels_of_axolotl(tokenizer: Any, template: str, case: str, row: dict[str, Any]) -> list[Any]:
    """(ids, labels) of the sequence that its prompt strategy chat_template makes of a row."""
    from axolotl.prompt_strategies.chat_template import load  # noqa: PLC0415
    from axolotl.utils.dict import DictDefault  # noqa: PLC0415

    config = {"train_on_inputs": False, "sequence_len": length_of(case), "chat_template": "tokenizer_default"}
    end = ENDS.get(template, tokenizer.eos_token)
    if end != tokenizer.eos_token:
        config["eot_tokens"] = [end]  # as axolotl's documentation says for such templates
    about = {"type": "chat_template", "path": case, "chat_template": "tokenizer_default"}
    made = load(tokenizer, DictDefault(config), about).tokenize_prompt(row)
    return [(list(made["input_ids"]), list(made["labels"]))]


PROGRAMS = {"llamafactory": labels_of_llamafactory, "axolotl": labels_of_axolotl}


def compact(ids: list[int], labels: list[int]) -> dict[str, Any]:
    """A sequence as its ids, and the first and the last position of each part with a loss."""
    trained = [n for n, label in enumerate(labels) if label != -100]
    assert [labels[n] for n in trained] == [ids[n] for n in trained]
    starts = [n for n in trained if n - 1 not in trained]
    return {"ids": ids, "trained": [[n, next(m for m in trained if m >= n and m + 1 not in trained)] for n in starts]}


def run_programs(folder: Path, packages: str) -> None:
    """Write the labels of the programs that this environment has into folder/labels.json; `packages` has what it
    lacks."""
    stand_in = folder / "stand-ins/torchaudio"  # LLaMA-Factory imports it for audio
    stand_in.mkdir(parents=True)
    (stand_in / "__init__.py").touch()
    sys.path += [packages, str(stand_in.parent)]
    from transformers import AutoTokenizer  # noqa: PLC0415

    made = {}
    for program, labels_of in PROGRAMS.items():
        if not util.find_spec(program):
            continue
        found = {
            template: {
                case: [
                    compact(*sequence)
                    for sequence in labels_of(AutoTokenizer.from_pretrained(folder / template), template, case, row)
                ]
                for case, row in rows_for(program).items()
                if is_recorded(template, case)
            }
            for template in TEMPLATES
        }
        versions = {name: metadata.version(name) for name in (program, "transformers")}
        made[program] = {"versions": versions, "labels": found}
    (folder / "labels.json").write_text(json.dumps(made))


def tokenizer_of(tiny: Path, template: str) -> Any:
    """The tiny model's tokenizer with a published template."""
    from test_every_template import own_tokenizer  # noqa: PLC0415
    from transformers import AutoTokenizer  # noqa: PLC0415

    from backend.train.templates import chatml  # noqa: PLC0415

    if template != "chatml":
        return own_tokenizer(tiny, template)
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    tokenizer.chat_template = chatml(tokenizer)
    return tokenizer


def text_of(golden: dict[str, Any]) -> str:
    """The golden file: a line for each case."""
    lines = []
    for line in json.dumps(golden, indent=1, sort_keys=True).splitlines():
        is_within = len(line) - len(line.lstrip()) > 4 or line.lstrip().startswith("]")
        lines.append(line.strip() if is_within else f"\n{line}")
    return "".join(lines).lstrip() + "\n"


def main() -> None:
    """Renew the labels of the programs in an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", type=Path, required=True, help="a virtual environment with a program")
    parser.add_argument("--run", nargs=2, help=argparse.SUPPRESS)  # in that environment: the folder, and packages
    chosen = parser.parse_args()
    if chosen.run:
        run_programs(Path(chosen.run[0]), chosen.run[1])
        return
    from backend.train import builtin_models  # noqa: PLC0415

    with tempfile.TemporaryDirectory() as name:
        os.environ["FOOTPLATE_CACHE"] = name
        folder = Path(name)
        builtin_models.prepare("tiny-llama", lambda *_: None)
        for template in TEMPLATES:
            tokenizer_of(folder / "models/tiny-llama", template).save_pretrained(folder / template)
        own = [str(chosen.env / "bin/python"), __file__, "--env", str(chosen.env), "--run", name]
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        environment |= {"HF_HUB_OFFLINE": "1", "DISABLE_VERSION_CHECK": "1", "AXOLOTL_DO_NOT_TRACK": "1"}
        subprocess.run([*own, sysconfig.get_path("purelib")], env=environment, check=True)
        made = json.loads((folder / "labels.json").read_text())
    golden = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
    GOLDEN.write_text(text_of(golden | made))
    for program, about in made.items():
        print(program, about["versions"])


if __name__ == "__main__":
    main()

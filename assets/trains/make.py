"""Generates the demo datasets: sentences about trains, each with a JSON object of the facts in it.

Standard library only. `python assets/trains/make.py` writes train.jsonl and validation.jsonl next to this file, and
the preference pairs (a right and a wrong completion per sentence) to ../train-pairs. The output is always the same,
byte for byte. A field that the sentence does not mention is null. Sentences also contain distracting numbers and
names: prices, seats, delays, other trains.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

SEED = 1825
CONVERSATIONS = {"train": 400, "validation": 32}
PAIRS = {"train": 300, "validation": 32}
PROBABILITIES = {"from": 0.75, "to": 0.9, "time": 0.8, "platform": 0.7}  # of a field being mentioned
SYSTEM = "As JSON: train, from, to, time (HH:MM), platform."

CITIES = """
Aachen Amsterdam Antwerp Basel Berlin Bern Bologna Bordeaux Bratislava Bremen Brno Brussels Budapest
Cologne Copenhagen Dresden Florence Frankfurt Freiburg Geneva Genoa Ghent Gothenburg Graz Hamburg
Hanover Innsbruck Kassel Krakow Leipzig Lille Linz Ljubljana London Lucerne Lyon Madrid Mainz
Marseille Milan Munich Nantes Naples Nice Nuremberg Oslo Ostend Padua Paris Porto Poznan Prague Rome
Rotterdam Salzburg Seville Stockholm Strasbourg Stuttgart Toulouse Trieste Turin Ulm Utrecht
Valencia Venice Verona Vienna Warsaw Wuppertal Zagreb Zurich
""".split()  # noqa: SIM905 (a list of words is easier to read this way)
# Train category in the completion -> how sentences write it.
KINDS = {
    "ICE": ("ICE", "ICE", "ICE train"),
    "IC": ("IC", "IC", "Intercity", "InterCity"),
    "EC": ("EC", "EC", "EuroCity"),
    "RE": ("RE", "RE", "Regional Express", "regional express"),
    "RB": ("RB", "regional train RB"),
    "NJ": ("NJ", "Nightjet", "night train NJ"),
    "TGV": ("TGV", "TGV"),
    "S": ("S", "S"),
}
HOURS = "twelve one two three four five six seven eight nine ten eleven".split()  # noqa: SIM905
MINUTES = {5: "five past", 10: "ten past", 15: "quarter past", 20: "twenty past", 30: "half past"}
MINUTES_TO = {40: "twenty to", 45: "quarter to", 50: "ten to", 55: "five to"}
NAMES = """
Anna Ben Carla David Emma Farid Greta Hugo Ines Jonas Kira Leo Mara Nils Olga Paul Rosa Sven Tara Yusuf
""".split()  # noqa: SIM905

# [ ... ] is dropped if a field inside is not mentioned; the sentence must read well without it.
SENTENCES = (
    # announcements
    "Attention please: {train}[ from {from}][ to {to}] departs[ at {time}][ from platform {platform}].{extra}",
    "Ladies and gentlemen, {train}[ to {to}] is now boarding[ on platform {platform}].[ Departure: {time}.]{extra}",
    "{extra} {train}[ from {from}] to {to} will leave[ at {time}][ from track {platform}] today.",
    "Change of platform! {train}[ bound for {to}][, departure {time},] leaves[ from platform {platform}] now.{extra}",
    "Next[ on platform {platform}]: {train}[ for {to}][, coming from {from}][, leaving {time}].{extra}",
    "Please board {train}[ to {to}] without delay[; it leaves {from} at {time}]. The doors close soon.{extra}",
    # emails
    "Dear {name}, your trip[ from {from}][ to {to}] is on {train}[, departing {time}][, platform {platform}].{extra}",
    "Hello {name}, I have reserved a seat on {train}.[ It goes from {from}][ to {to}][ at {time}].{extra}",
    "Dear passenger, we expect you on {train}[ to {to}][, leaving {from}][ at {time}][, track {platform}].{extra}",
    "Booking done. {extra} Train: {train}.[ From: {from}.][ To: {to}.][ Departure: {time}.][ Platform: {platform}.]",
    # chat
    "hey {name}, im taking {train}[ to {to}][ at {time}]{extra_chat} see you there",
    "{name}!! we need to run, {train}[ to {to}] leaves[ from platform {platform}][ at {time}]{extra_chat}",
    "ok so[ we meet in {from} and] we take {train}[ to {to}][, {time}][, platform {platform} i think]{extra_chat}",
    "can you pick me up? i come[ from {from}] with {train}[ and it starts at {time}][, track {platform}]{extra_chat}",
    "my train is {train}[ out of {from}][ to {to}][, it goes at {time}]{extra_chat} dont be late {name}",
    # questions
    "Is it true that {train}[ to {to}] goes[ from platform {platform}][ at {time}] today?{extra}",
    "Could you tell {name} that {train}[ from {from}][ to {to}] is the one[ at {time}] to take?{extra}",
    "Does {train} still leave[ {from}][ for {to}][ at {time}], or was it cancelled?{extra}",
    # notes and tickets
    "{from} - {to}, {train}[, dep {time}][, pl. {platform}].{extra}",
    "Ticket for {name}: {train}[ | {from}][ -> {to}][ | {time}][ | platform {platform}].{extra}",
    "Note to self: {train}[ at {time}][ from {from}][ towards {to}][, platform {platform}].{extra}",
    "[{time}: ]{train}[ to {to}][ ({from})][, track {platform}].{extra}",
    # narration
    "{name} left[ {from}][ at {time}] on {train}[, heading for {to}].{extra}",
    "{train} stood ready[ on platform {platform}][ in {from}],[ due to leave for {to}][ at {time},] doors open.{extra}",
    "The guard told us: {train}[, departure {time}][, platform {platform}][, through to {to}].{extra}",
    "We missed the earlier one, so we are going[ to {to}] by {train}[ at {time}][ from {from}].{extra}",
)
EXTRAS = (
    "",
    "",
    " {other} on platform {n} is cancelled.",
    " {other} to {city} is {n} minutes late.",
    " Your seat is {seat} in coach {n}.",
    " The fare is {price} euros.",
    " First class is in coaches {n} and {m}.",
    " Do not confuse it with {other} to {city}.",
    " It arrives at {arrival}.",
    " Reservation code {code}.",
    " The restaurant car closes {n} minutes before arrival.",
    " A change to {other} is possible in {city}.",
    " Lift {n} is out of order.",
    " {m} people are waiting already.",
)
CHATTER = (
    "Sure! Here is the JSON you asked for: {json}",
    "{json} Have a good trip!",
    "The train is the following: {json}. Let me know if you need anything else.",
    "{json} {json}",
)
CHATTY = (
    ",",
    ",",
    " :)",
    " (coach {n}),",
    " and it was only {price} euros,",
    ", not {other} like last time,",
    ", seat {seat},",
    ", {n} min late as usual,",
)


def say_time(rng: random.Random, hour: int, minute: int) -> str:
    """A time of day in one of several notations, never ambiguous about morning or evening; half of them as HH:MM."""
    digits = f"{hour:02}:{minute:02}"
    if rng.random() < 0.5:
        return digits
    half = "am" if hour < 12 else "pm"
    part = "in the morning" if hour < 12 else "in the afternoon" if hour < 18 else "in the evening"
    short = (hour - 1) % 12 + 1
    ways = [
        digits.replace(":", ".") if hour > 12 else digits,
        f"{short}:{minute:02} {half}",
        f"{short}.{minute:02} {half}",
    ]
    if minute in MINUTES:
        ways += [f"{MINUTES[minute]} {HOURS[hour % 12]} {part}"]
    if minute in MINUTES_TO and hour not in (11, 17, 23):  # "to six in the evening" would begin in the afternoon
        ways += [f"{MINUTES_TO[minute]} {HOURS[(hour + 1) % 12]} {part}"]
    if minute == 0:
        ways += [f"{HOURS[hour % 12]} o'clock {part}", f"{short} {half}"]
    return "noon" if digits == "12:00" else rng.choice(ways)


def a_train(rng: random.Random) -> tuple[str, str]:
    """A train as the sentence writes it, and its name in the completion."""
    kind = rng.choice(list(KINDS))
    number = (
        rng.randint(1, 9) if kind == "S" else rng.randint(10, 99) if kind in ("RE", "RB") else rng.randint(100, 2999)
    )
    written = rng.choice(KINDS[kind])
    joint = "" if written == kind and rng.random() < 0.25 else " "
    return f"{written}{joint}{number}", f"{kind} {number}"


def fill(text: str, values: dict[str, str | None]) -> str:
    """Fill {slots}; a [bracket] is kept if all of its slots have values."""
    parts = []
    for piece in text.replace("]", "[").split("["):
        optional = f"[{piece}]" in text
        missing = any(f"{{{key}}}" in piece and value is None for key, value in values.items())
        if not (optional and missing):
            parts.append(piece)
    filled = "".join(parts)
    for key, value in values.items():
        filled = filled.replace(f"{{{key}}}", value or "")
    return filled


def distraction(rng: random.Random, texts: tuple[str, ...], hour: int) -> str:
    """A phrase with numbers and names that do not belong to the completion."""
    values = {
        "other": a_train(rng)[0],
        "city": rng.choice(CITIES),
        "n": str(rng.randint(2, 19)),
        "m": str(rng.randint(20, 90)),
        "seat": f"{rng.randint(11, 98)}",
        "price": f"{rng.randint(9, 149)}.{rng.choice(('00', '50', '90'))}",
        "arrival": say_time(rng, (hour + rng.randint(1, 5)) % 24 or 1, rng.randrange(0, 60, 5)),
        "code": "".join(rng.choice("ABCDEFGHKLMNPRSTUVWXYZ23456789") for _ in range(6)),
    }
    return fill(rng.choice(texts), values)


def mentioned(sentence: str, known: dict[str, bool]) -> set[str]:
    """The fields outside of brackets, and those in brackets where all fields are known."""
    parts = set()
    for piece in sentence.replace("]", "[").split("["):
        inside = {key for key in known if f"{{{key}}}" in piece}
        if f"[{piece}]" not in sentence or all(known[key] for key in inside):
            parts |= inside
    return parts


def make_example(rng: random.Random) -> tuple[str, dict[str, str | None]]:
    """A sentence, and the facts in it."""
    sentence = rng.choice(SENTENCES)
    written, train = a_train(rng)
    start, goal = rng.sample(CITIES, 2)
    hour = rng.randint(4, 23)
    minute = rng.choice((*range(0, 60, 5), rng.randint(1, 59)))
    platform = f"{rng.randint(1, 24)}{rng.choice(('', '', '', '', 'a', 'b'))}"
    parts = mentioned(sentence, {key: rng.random() < chance for key, chance in PROBABILITIES.items()})
    answer = {"from": start, "to": goal, "time": f"{hour:02}:{minute:02}", "platform": platform}
    values = {key: value if key in parts else None for key, value in answer.items()}
    spoken = {**values, "time": say_time(rng, hour, minute) if "time" in parts else None}
    more = {"train": written, "name": rng.choice(NAMES)}
    extras = {"extra": distraction(rng, EXTRAS, hour), "extra_chat": distraction(rng, CHATTY, hour)}
    text = fill(sentence, {**spoken, **more, **extras})
    return " ".join(text.split()), {"train": train, **values}


def conversations() -> dict[str, list[str]]:
    """File name -> its lines."""
    rng = random.Random(SEED)
    made: dict[str, dict[str, str | None]] = {}
    while len(made) < sum(CONVERSATIONS.values()):
        text, answer = make_example(rng)
        made.setdefault(text, answer)
    lines = [line(text, answer) for text, answer in made.items()]
    return {"train.jsonl": lines[: CONVERSATIONS["train"]], "validation.jsonl": lines[CONVERSATIONS["train"] :]}


def line(text: str, answer: dict[str, str | None]) -> str:
    """One conversation as a line of the file."""
    turns = (("system", SYSTEM), ("user", text), ("assistant", json.dumps(answer)))
    return json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})


def wrong_completion(rng: random.Random, answer: dict[str, str | None]) -> str:
    """A plausible wrong completion: one of the mistakes that small models make."""
    present = [key for key in PROBABILITIES if answer[key]]
    absent = [key for key in PROBABILITIES if not answer[key]]
    ways = (
        ["chatter", "kind"]
        + ["swapped"] * 3 * ("from" in present and "to" in present)
        + ["time"] * 3 * ("time" in present)
    )
    ways += ["dropped"] * bool(present) + ["invented"] * 2 * bool(absent)
    wrong, way = dict(answer), rng.choice(ways)
    if way == "chatter":
        return rng.choice(CHATTER).format(json=json.dumps(answer))
    if way == "swapped":
        wrong["from"], wrong["to"] = answer["to"], answer["from"]
    elif way == "time":
        hour, minute = map(int, str(answer["time"]).split(":"))
        hour, minute = rng.choice(((hour + 12, minute), (hour + 1, minute), (hour, minute + 30), (hour, minute + 55)))
        wrong["time"] = f"{hour % 24:02}:{minute % 60:02}"
    elif way == "kind":
        kind, number = str(answer["train"]).split()
        wrong["train"] = f"{rng.choice([k for k in KINDS if k != kind])} {number}"
    elif way == "dropped":
        wrong[rng.choice(present)] = None
    else:
        invented = {"from": rng.choice(CITIES), "to": rng.choice(CITIES), "time": "12:00", "platform": "1"}
        part = rng.choice(absent)
        wrong[part] = invented[part]
    return json.dumps(wrong)


def pairs() -> dict[str, list[str]]:
    """File name -> its lines, each with a chosen and a rejected completion."""
    rng = random.Random(SEED + 1)
    made: dict[str, str] = {}
    while len(made) < sum(PAIRS.values()):
        text, answer = make_example(rng)
        made.setdefault(text, pair(text, json.dumps(answer), wrong_completion(rng, answer)))
    lines = list(made.values())
    return {"train.jsonl": lines[: PAIRS["train"]], "validation.jsonl": lines[PAIRS["train"] :]}


def pair(text: str, chosen: str, rejected: str) -> str:
    """One preference pair as a line of the file."""
    row = {"prompt": [("system", SYSTEM), ("user", text)]}
    row |= {"chosen": [("assistant", chosen)], "rejected": [("assistant", rejected)]}
    return json.dumps({name: [{"role": who, "content": what} for who, what in part] for name, part in row.items()})


def main() -> None:
    """Write the files to `trains` and `train-pairs` in assets/, or in the folder given as the first argument."""
    here = Path(__file__).resolve().parent.parent
    root = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else here
    for folder, files in (("trains", conversations()), ("train-pairs", pairs())):
        (root / folder).mkdir(exist_ok=True)
        for name, lines in files.items():
            (root / folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

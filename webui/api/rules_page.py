"""The catalogue of rules as a page: what Footplate refuses or warns of, why, and where that is written.

Floor 6. Imports: options, rules. Everything is escaped; the filters work on what stands in the page. What is no longer
so is found beside the rules.
"""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse, Response

from backend.config.options import by_name
from backend.rules import FAMILIES, RULES, STALE, Rule, Stale, offered
from webui.api.app_state import Desk
from webui.api.requests import Ask

LEVELS = {"error": "Error", "warning": "Warning", "advice": "Advice"}
PROOFS = {"launch": "a test launches the bad case and sees it fail", "gpu": "needs a GPU", "": ""}


def rules_page(desk: Desk, ask: Ask) -> Response:
    """The page."""
    parts = {
        "{count}": str(len(RULES)),
        "{levels}": "".join(
            f'<button type="button" data-chip="{name}">{word}</button>' for name, word in LEVELS.items()
        ),
        "{families}": "".join(
            f'<option value="{code}">{escape(title)}</option>' for code, (_, title) in FAMILIES.items()
        ),
        "{cards}": "".join(map(_card, RULES)),
        "{stale}": "".join(map(_old, STALE)),
    }
    page = PAGE
    for name, text in parts.items():
        page = page.replace(name, text)
    return HTMLResponse(page, headers={"cache-control": "no-cache"})


def _card(rule: Rule) -> str:
    known = by_name()
    fields = ", ".join(known[name].label if name in known else name for name in rule.fields)
    return CARD.format(
        code=escape(rule.code),
        family=escape(rule.code.rstrip("0123456789")),
        level=escape(rule.level),
        word=escape(LEVELS.get(rule.level, rule.level)),
        title=escape(rule.title),
        why=escape(rule.why),
        fields=f'<p class="dim">Looks at: {escape(fields)}</p>' if fields else "",
        remedy=f"<p>Way out: {escape(rule.remedy)}</p>" if rule.remedy else "",
        fixes=_fixes(rule),
        source=_dim("Source", rule.source),
        proof=_dim("Proof", PROOFS[rule.proof]),
    )


def _fixes(rule: Rule) -> str:
    said = (escape(fix.label) + (f" <i>{escape(fix.cost)}</i>" if fix.cost else "") for fix in offered()[rule.code])
    fixes = "".join(f"<li>{text}</li>" for text in said)
    return f"<ul>{fixes}</ul>" if fixes else ""


def _old(old: Stale) -> str:
    proof = f"a launch, tests/process/{old.test}" if old.test else "read, not launched"
    more = _dim("Seen with", old.seen) + _dim("Proof", proof)
    title, belief, now = (escape(text) for text in (old.pair, old.belief, old.now))
    return f"<article><header><h2>{title}</h2></header><p><s>{belief}</s></p><p>{now}</p>{more}</article>"


def _dim(name: str, text: str) -> str:
    return f'<p class="dim">{name}: {escape(text)}</p>' if text else ""


CARD = """
<article id="{code}" data-level="{level}" data-family="{family}">
<header><span class="level">{word}</span><h2>{title}</h2><a href="#{code}">{code}</a></header>
<p>{why}</p>{fixes}{remedy}{fields}{source}{proof}
</article>"""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Footplate: rules</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="footplate/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="footplate/page.css">
<style>
body{margin:0;background:var(--fp-bg);color:var(--fp-text);font:15px/1.55 system-ui,-apple-system,"Segoe UI",sans-serif}
main{max-width:46rem;margin:0 auto;padding:32px 20px 64px}
h1{font-size:22px;margin:0 0 4px}
main p{margin:6px 0 0;overflow-wrap:anywhere}
.dim,main>header p{color:var(--fp-dim);font-size:13px}
.search{display:flex;gap:12px;align-items:center;position:sticky;top:0;padding:16px 0 12px;background:var(--fp-bg)}
.search input{flex:1;font:inherit;padding:7px 12px;border:1px solid var(--fp-line);border-radius:6px;
  background:var(--fp-panel);color:var(--fp-text)}
.search input:focus-visible{outline:2px solid var(--fp-accent);outline-offset:1px}
article{background:var(--fp-panel);border:1px solid var(--fp-line);border-radius:var(--fp-radius);
  padding:12px 16px 14px;margin-bottom:10px;scroll-margin-top:76px}
article:target{border-color:var(--fp-accent)}
article[hidden]{display:none}
.search{flex-wrap:wrap}
.search input{min-width:180px}
.search :is(button,select){font:13px/1.2 inherit;font-family:inherit;padding:6px 12px;border:1px solid var(--fp-line);
  border-radius:999px;background:var(--fp-panel);color:var(--fp-dim);cursor:pointer}
.search select{max-width:200px;border-radius:6px}
.search button[aria-pressed=true]{border-color:var(--fp-accent);color:var(--fp-accent)}
.search [role=status]{min-width:6.5em;text-align:right}
article ul{margin:8px 0 0;padding:0;list-style:none;display:flex;flex-wrap:wrap;gap:4px 16px;font-size:14px}
article li::before{content:"Fix: ";color:var(--fp-dim)}
article i{font-style:normal;color:var(--fp-dim);font-size:13px}
article s{color:var(--fp-dim)}
main>header a{color:var(--fp-accent)}
section>.dim{margin-bottom:10px}
h2.part{font-size:17px;margin:32px 0 2px;scroll-margin-top:76px}
article header{display:flex;align-items:baseline;gap:10px}
article h2{flex:1;font-size:15px;font-weight:600;margin:0}
article a{font:12px var(--fp-mono);color:var(--fp-dim);text-decoration:none}
article a:hover{color:var(--fp-accent)}
.level{font-size:12px;font-weight:600;border-radius:4px;padding:1px 7px;
  background:var(--fp-accent-soft);color:var(--fp-accent)}
[data-level=error] .level{background:var(--fp-bad-soft);color:var(--fp-bad)}
[data-level=warning] .level{background:var(--fp-warn-soft);color:var(--fp-warn)}
</style></head><body>
<script>
const dark = matchMedia("(prefers-color-scheme: dark)").matches;
const wanted = localStorage.getItem("fp-theme") || (dark ? "dark" : "light");
document.body.classList.toggle("dark", wanted === "dark");
</script>
<main>
<header><h1>Rules</h1>
<p>What Footplate looks at before a run starts. An error cannot run; a warning runs, but not as asked.
<a href="#no-longer-so">No longer so</a>: what was refused once and works now.</p></header>
<div class="search"><input type="search" placeholder="Find a rule" aria-label="Find a rule">
{levels}<select aria-label="Family"><option value="">All families</option>{families}</select>
<span class="dim" role="status">{count} rules</span></div>
{cards}
<section><h2 class="part" id="no-longer-so">No longer so</h2>
<p class="dim">Beliefs of earlier versions that no rule holds any more.</p>
{stale}</section>
<p class="dim" id="none" hidden>Nothing here says that.</p>
</main>
<script>
const input = document.querySelector(".search input");
const family = document.querySelector(".search select");
const chips = [...document.querySelectorAll("[data-chip]")];
const count = document.querySelector(".search [role=status]");
const cards = [...document.querySelectorAll("article")];
const texts = cards.map((card) => card.textContent.toLowerCase());
const rules = cards.filter((card) => card.id).length;
function filter() {
  const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
  const levels = chips.filter((chip) => chip.ariaPressed === "true").map((chip) => chip.dataset.chip);
  cards.forEach((card, i) => {
    const { level = "", family: own = "" } = card.dataset;
    const wanted = (!levels.length || levels.includes(level)) && (!family.value || family.value === own);
    card.hidden = !wanted || !words.every((word) => texts[i].includes(word));
  });
  const shown = cards.filter((card) => !card.hidden);
  const found = shown.filter((card) => card.id).length;
  count.textContent = found < rules ? `${found} of ${rules}` : `${rules} rules`;
  document.querySelector("section").hidden = shown.length === found;
  document.querySelector("#none").hidden = shown.length > 0;
}
chips.forEach((chip) => {
  chip.ariaPressed = "false";
  chip.addEventListener("click", () => { chip.ariaPressed = String(chip.ariaPressed !== "true"); filter(); });
});
input.addEventListener("input", filter);
family.addEventListener("change", filter);
document.querySelector("main>header a").addEventListener("click", () => { // what is looked for may be filtered out
  input.value = family.value = "";
  chips.forEach((chip) => (chip.ariaPressed = "false"));
  filter();
});
if (location.hash) document.querySelector(location.hash)?.scrollIntoView();
</script>
</body></html>
"""

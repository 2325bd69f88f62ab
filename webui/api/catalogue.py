"""The catalogue of rules as a page: what Footplate refuses or warns of, why, and where that is written.

Floor 6. Imports: options, rules. Everything is escaped; the filter works on the text that stands in the page.
"""

from __future__ import annotations

from html import escape

from starlette.responses import HTMLResponse, Response

from backend.options import by_name
from backend.rules import RULES, Rule
from webui.api.asking import Ask
from webui.api.desk import Desk

LEVELS = {"error": "Error", "warning": "Warning", "advice": "Advice"}


def rules_page(desk: Desk, ask: Ask) -> Response:
    """The page."""
    cards = "".join(map(_card, RULES))
    page = PAGE.replace("{count}", str(len(RULES))).replace("{cards}", cards)
    return HTMLResponse(page, headers={"cache-control": "no-cache"})


def _card(rule: Rule) -> str:
    known = by_name()
    fields = ", ".join(known[name].label if name in known else name for name in rule.fields)
    return CARD.format(
        code=escape(rule.code),
        level=escape(rule.level),
        word=escape(LEVELS.get(rule.level, rule.level)),
        title=escape(rule.title),
        why=escape(rule.why),
        fields=f'<p class="dim">Looks at: {escape(fields)}</p>' if fields else "",
        remedy=f"<p>Way out: {escape(rule.remedy)}</p>" if rule.remedy else "",
        source=f'<p class="dim">Source: {escape(rule.source)}</p>' if rule.source else "",
    )


CARD = """
<article id="{code}" data-level="{level}">
<header><span class="level">{word}</span><h2>{title}</h2><a href="#{code}">{code}</a></header>
<p>{why}</p>{remedy}{fields}{source}
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
<p>What Footplate looks at before a run starts. An error cannot run; a warning runs, but not as asked.</p></header>
<div class="search"><input type="search" placeholder="Find a rule" aria-label="Find a rule">
<span class="dim" role="status">{count} rules</span></div>
{cards}
</main>
<script>
const input = document.querySelector(".search input");
const count = document.querySelector(".search [role=status]");
const cards = [...document.querySelectorAll("article")];
const texts = cards.map((card) => card.textContent.toLowerCase());
input.addEventListener("input", () => {
  const words = input.value.toLowerCase().split(/\\s+/).filter(Boolean);
  let found = 0;
  cards.forEach((card, i) => {
    card.hidden = !words.every((word) => texts[i].includes(word));
    found += card.hidden ? 0 : 1;
  });
  count.textContent = words.length ? `${found} of ${cards.length}` : `${cards.length} rules`;
});
</script>
</body></html>
"""

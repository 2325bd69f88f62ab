"""The Rules page: what each rule checks, why, an example, its fixes, its source and its proof.

All text is escaped; static/rules.js filters the cards.
"""

from __future__ import annotations

from functools import cache
from html import escape

from starlette.responses import HTMLResponse, Response

from backend.config.options import by_name
from backend.rules import FAMILIES, OUTDATED, RULES, Fix, Outdated, Rule, example_findings
from webui.page_frame import static_page

LEVELS = {"error": "Error", "warning": "Warning", "advice": "Advice"}


def rules_page() -> Response:
    """The page as HTML."""
    return HTMLResponse(_html(), headers={"cache-control": "no-cache"})


@cache
def _html() -> str:
    parts = {
        "{count}": str(len(RULES)),
        "{levels}": "".join(
            f'<button type="button" aria-pressed="false" data-chip="{level}">{word}</button>'
            for level, word in LEVELS.items()
        ),
        "{families}": "".join(f'<option value="{code}">{escape(title)}</option>' for code, title in FAMILIES.items()),
        "{rules}": "".join(map(_rule_card, RULES)),
        "{outdated}": "".join(map(_outdated_card, OUTDATED)),
    }
    content = CONTENT
    for name, text in parts.items():
        content = content.replace(name, text)
    return static_page("rules", "Rules", content, root="./", scripts=("rules.js",))


def _rule_card(rule: Rule) -> str:
    known = by_name()
    fields = ", ".join(known[name].label if name in known else name for name in rule.fields)
    example = example_findings().get(rule.code)
    details = [
        _row("Example", example.message if example else ""),
        _fixes(example.fixes if example else rule.fixes),
        _row("Manual fix", rule.manual_fix),
        _row("Options", fields),
        _row("Source", rule.source),
        _row("Proof", rule.proof_text),
    ]
    return CARD.format(
        code=escape(rule.code),
        slug=escape(rule.slug),
        family=escape(rule.family),
        level=escape(rule.level),
        word=escape(LEVELS[rule.level]),
        title=escape(rule.title),
        reason=escape(rule.reason),
        details="".join(details),
    )


def _fixes(fixes: tuple[Fix, ...]) -> str:
    """Each fix with its cost, and whether training results stay the same."""
    items = []
    for fix in fixes:
        notes = [fix.cost, fix.effect]
        note = "; ".join(note for note in notes if note)
        safe = '<b class="safe">safe</b>' if fix.safe else ""
        items.append(f"<li>{escape(fix.label)} {safe}{f' <i>{escape(note)}</i>' if note else ''}</li>")
    return f"<dt>Fixes</dt><dd><ul>{''.join(items)}</ul></dd>" if items else ""


def _outdated_card(outdated: Outdated) -> str:
    details = _row("Verified with", outdated.verified_with) + _row("Proof", outdated.proof)
    title, before, now = (escape(text) for text in (outdated.topic, outdated.before, outdated.now))
    return f"<article><header><h2>{title}</h2></header><p><s>{before}</s></p><p>{now}</p><dl>{details}</dl></article>"


def _row(name: str, text: str) -> str:
    return f"<dt>{name}</dt><dd>{escape(text)}</dd>" if text else ""


CARD = """
<article id="{code}" data-level="{level}" data-family="{family}">
<header><span class="level">{word}</span><h2>{title}</h2><a href="#{code}">{code} {slug}</a></header>
<p>{reason}</p><dl>{details}</dl>
</article>"""

CONTENT = """<main id="fp-content" tabindex="-1">
<header><h1>Rules</h1>
<p>What Footplate checks before a run starts. An error prevents the start; a warning means that the run works
differently from what its options say; advice suggests a better choice. A safe fix does not change the training result.
See also <a href="#outdated">outdated advice</a>: combinations that used to fail and work now.</p></header>
<div class="search"><input type="search" placeholder="Search rules" aria-label="Search rules">
{levels}<select aria-label="Topic"><option value="">All topics</option>{families}</select>
<span class="dim" role="status">{count} rules</span></div>
{rules}
<section><h2 class="part" id="outdated">Outdated advice</h2>
<p class="dim">Limits of earlier library versions that the rules no longer enforce.</p>
{outdated}</section>
<p class="dim" id="none" hidden>No rule matches the search.</p>
</main>"""

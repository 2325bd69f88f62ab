"""The header that all pages share, and the frame of the pages without Gradio: the rules and the help.

`root` is the relative path from a page to the folder of the main page, which may be served below any path.
"""

from __future__ import annotations

from html import escape

MACHINE = """<div class="fp-machine" title="The hardware that the options are checked for. A run can start only on \
this machine or, with Run on, on a cluster; for other hardware, export it."><label>Machine
    <select id="fp-machine" aria-label="Target machine"></select></label>
    <button type="button" class="fp-link" id="fp-machine-edit" aria-label="Edit this machine" hidden>Edit</button>
    <button type="button" class="fp-link" id="fp-machine-add" aria-label="Add a machine">Add</button></div>"""
HEADER = """
<a class="fp-skip" id="fp-skip" href="{skip}">Skip to content</a>
{report}<header class="fp-top">
  <a class="fp-brand" href="{root}?tab=build" data-tab="build">Footplate</a>
  {title}<nav aria-label="Views">
    <a href="{root}?tab=build" data-tab="build">Build</a>
    {run}<a href="{root}?tab=runs" data-tab="runs">Runs</a>
    <a href="{root}rules"{rules}>Rules</a>
    <a href="{root}help/getting-started"{help}>Help</a>
  </nav>
  {machine}<button type="button" class="fp-icon" id="fp-theme" aria-label="Switch between light and dark theme"
    title="Switch between light and dark theme"></button>
  <form method="post" action="{root}logout" id="fp-logout" hidden><button class="fp-link">Log out</button></form>
</header>
"""
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title} - Footplate</title>
<meta name="viewport" content="width=device-width">
<link rel="icon" href="{root}footplate/icon.svg" type="image/svg+xml">
{styles}
</head><body class="fp-page fp-{name}">
<script src="{root}footplate/page_theme.js"></script>
{header}
{content}
{scripts}
</body></html>
"""


def main_header() -> str:
    """The header of the main page. Its scripts show the views and the machine."""
    return HEADER.format(
        root="",
        skip="#fp-build",
        report='<a class="fp-skip" id="fp-skip-report" href="#fp-status">Skip to check report and Start</a>\n',
        title='<h1 class="fp-sr" id="fp-title">Build a run</h1>\n  ',
        run='<a href="?tab=run" data-tab="run" hidden>Run</a>\n    ',
        rules="",
        help="",
        machine=f"{MACHINE}\n  ",
    )


def static_page(name: str, title: str, content: str, *, root: str, scripts: tuple[str, ...] = ()) -> str:
    """A page that consists of `content`, which is HTML with one element `#fp-content`. `name` is rules or help."""
    current = {entry: ' aria-current="page"' if entry == name else "" for entry in ("rules", "help")}
    styles = ("page.css", "responsive.css", "static_page.css", f"{name}.css")
    return PAGE.format(
        name=name,
        title=escape(title),
        root=root,
        styles="\n".join(f'<link rel="stylesheet" href="{root}footplate/{style}">' for style in styles),
        header=HEADER.format(root=root, skip="#fp-content", report="", title="", run="", machine="", **current),
        content=content,
        scripts="\n".join(
            f'<script type="module" src="{root}footplate/{script}"></script>' for script in ("static_page.js", *scripts)
        ),
    )

"""Markdown and Python as HTML."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from html import escape
from itertools import pairwise

from markdown_it import MarkdownIt
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import TextLexer, get_lexer_by_name
from pygments.util import ClassNotFound

Link = Callable[[str], str | None]
FORMAT = HtmlFormatter(nowrap=True)


COMMENT = re.compile(r"^<!--.*?-->\n", re.M)  # the marks of generated parts


def markdown(text: str, link: Link) -> str:
    """`link` maps the target of a link to an address, or to None where the site has no such page.

    >>> markdown("# One *two*\\n\\n[a](a.md) [b](b.md)", {"a.md": "a.html"}.get)
    '<h1 id="one-two">One <em>two</em></h1>\\n<p><a href="a.html">a</a> <span>b</span></p>\\n'
    """
    parser = MarkdownIt("commonmark", {"html": False, "highlight": code}).enable("table")
    tokens = parser.parse(COMMENT.sub("", text))
    for heading, inline in pairwise(tokens):
        if heading.type == "heading_open":
            heading.attrSet("id", slug(inline.content))
    for token in tokens:
        closing = "a"
        for child in token.children or ():
            if child.type == "link_open":
                href = link(str(child.attrGet("href")))
                closing = "a" if href else "span"
                child.attrs = {"href": href} if href else {}
            if child.type in ("link_open", "link_close"):
                child.tag = closing
            if child.type == "text" and re.search(r"[_^]\{", child.content):
                child.type, child.content = "html_inline", raised(child.content)
    html: str = parser.renderer.render(tokens, parser.options, {})
    return html.replace("<table>", '<div class="scroll"><table>').replace("</table>", "</table></div>")


def raised(words: str) -> str:
    """
    >>> raised("l_{n+1} < e^{x - m}")
    'l<sub>n+1</sub> &lt; e<sup>x - m</sup>'
    """
    words = re.sub(r"\^\{([^{}]*)\}", r"<sup>\1</sup>", escape(words))
    return re.sub(r"_\{([^{}]*)\}", r"<sub>\1</sub>", words)


def code(source: str, language: str = "python", _attributes: str = "") -> str:
    """Highlighted, without the `pre` around it."""
    try:
        lexer = get_lexer_by_name(language)
    except ClassNotFound:
        lexer = TextLexer()
    return str(highlight(source, lexer, FORMAT))


def block(source: str, language: str = "python") -> str:
    return f"<pre><code>{code(source, language)}</code></pre>\n"


def docstring(text: str, link: Link) -> str:
    """Docstrings are almost Markdown; their examples are not.

    >>> print(docstring("Adds.\\n\\n>>> 1 + 1\\n2\\n", str), end="")
    <p>Adds.</p>
    <pre><code class="language-pycon"><span class="gp">&gt;&gt;&gt; </span><span class="mi">1</span> ...
    <span class="go">2</span>
    </code></pre>
    """
    first, _, rest = text.partition("\n")
    text = first.strip() + "\n" + textwrap.dedent(rest)
    example = re.compile(r"^>>> .*\n(?:.+\n)*(?:\n(?=>>> ).*\n(?:.+\n)*)*", re.M)
    return markdown(example.sub(lambda found: f"\n```pycon\n{found[0]}```\n", text.strip() + "\n"), link)


def slug(heading: str) -> str:
    """
    >>> slug("What `attention` does, and why")
    'what-attention-does-and-why'
    """
    return "-".join(re.findall(r"\w+", heading.lower()))


def style() -> str:
    """Colours of code for both themes."""
    dark = HtmlFormatter(style="github-dark").get_style_defs("pre")
    lines = [line for line in dark.splitlines() if line.startswith("pre .")]
    light = HtmlFormatter(style="friendly").get_style_defs("pre").splitlines()
    night = "\n".join(lines)
    return "\n".join(line for line in light if line.startswith("pre .")) + (
        f"\n@media (prefers-color-scheme: dark) {{\n{night}\n}}\n"
    )

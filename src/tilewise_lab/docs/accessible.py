"""Repairs of the HTML that Sphinx 8 and 9 write and axe reports: captions without a level, lists without
terms, wide tables that the keyboard cannot scroll."""

from __future__ import annotations

import re

TABLE = re.compile(r'<div class="table-wrapper[^"]*"(?=>)')
SIGNATURE = re.compile(r'<dl>\n((?:<dd><em class="sig-param">.*?</dd>\n)+)</dl>')


def menu(html: str) -> str:
    """The captions of a menu as headings of level 2.

    >>> menu('<p class="caption" role="heading">Start</p>')
    '<p class="caption" role="heading" aria-level="2">Start</p>'
    """
    return html.replace('role="heading">', 'role="heading" aria-level="2">')


def body(html: str) -> str:
    r"""The lines of long signatures as plain blocks: a definition list needs terms. Wide tables take the focus.

    >>> body('<dl>\n<dd><em class="sig-param">q</em>,</dd>\n</dl>')
    '<span class="sig-lines">\n<span><em class="sig-param">q</em>,</span>\n</span>'
    >>> body('<div class="table-wrapper docutils container">')
    '<div class="table-wrapper docutils container" tabindex="0">'
    """

    def lines(found: re.Match[str]) -> str:
        inner = found[1].replace("<dd>", "<span>").replace("</dd>", "</span>")
        return f'<span class="sig-lines">\n{inner}</span>'

    return TABLE.sub(r'\g<0> tabindex="0"', SIGNATURE.sub(lines, html))

"""The site, for Sphinx. `./run docs` brings the pages together and builds them in both languages."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment
from sphinx.pycode import ModuleAnalyzer
from sphinx.search.zh import SearchChinese
from sphinx.util import logging

import tilewise
from tilewise_lab.docs import accessible, docstrings, inventories
from tilewise_lab.docs.build import ROOT, is_english_only
from tilewise_lab.docs.translations import FILE, Translations

project = "tilewise"
version = release = tilewise.__version__
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx_copybutton",
]
exclude_patterns = ["files", "_build"]

myst_enable_extensions = [
    "dollarmath",
    "colon_fence",
    "deflist",
    "attrs_inline",
]
myst_heading_anchors = 4

smartquotes = False  # straight ones are as good, and looking for them takes a twentieth of the time
highlight_language = "none"  # of blocks that name none
autodoc_typehints = "both"
autodoc_typehints_description_target = "documented_params"
suppress_warnings = [
    "ref.python"
]  # several classes are called Tile: a type in a signature may link to another one
autodoc_mock_imports = [
    "transformers",
    "diffusers",
]  # described here, and not needed for it
autodoc_member_order = "bysource"
python_maximum_signature_line_length = (
    60  # without the module's name; a longer one has a parameter a line
)
python_use_unqualified_type_names = True
toc_object_entries_show_parents = "hide"
intersphinx_mapping = inventories.mapping(
    Path(__file__).parent / "inventories"
)

pygments_dark_style = "github-dark"
html_theme = "furo"
html_title = "tilewise"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["sidebar.js"]
html_favicon = "_static/favicon.svg"
html_search_scorer = str(Path(__file__).parent / "_static" / "scorer.js")
html_domain_indices = False
html_use_index = False
templates_path = ["_templates"]
html_theme_options = {
    "top_of_page_buttons": ["view"]
}  # whose template is the switch of languages
html_copy_source = False
html_show_copyright = False
html_math_renderer = (
    "mathml"  # drawn by the browser: no script, no font, no network
)
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


class Pairs(SearchChinese):
    """Chinese has no spaces: every two neighbouring characters are a word, in the pages and in what is asked."""

    language_name = "English"  # the stemmer of the words that are Latin: Sphinx looks for it by this name

    def split(self, text: str) -> list[str]:
        self.latin_terms.update(re.findall(r"[a-zA-Z0-9_]+", text))
        return [
            part
            for word in re.findall(r"[a-zA-Z0-9_]+|[\u4e00-\u9fff]+", text)
            for part in (
                [word] if word.isascii() else map("".join, pairwise(word))
            )
        ]

    js_splitter_code = r"""
function splitQuery(query) {
  const pairs = (word) => Array.from(word).slice(1).map((letter, i) => word[i] + letter);
  const words = query.match(/[a-zA-Z0-9_]+|[\u4e00-\u9fff]+/g) || [];
  return words.flatMap((word) => (word.charCodeAt(0) < 128 ? [word] : pairs(word)));
}
"""


def formula(
    translator: object, node: nodes.math | nodes.math_block
) -> None:
    try:
        translator.body.append(
            tex2mathml(
                node.astext(), as_block=isinstance(node, nodes.math_block)
            )
        )
    except MathError as error:
        logging.getLogger(__name__).warning(
            "a formula: %s: %s", error, node.astext(), location=node
        )
    raise nodes.SkipNode


def light_menu(
    app: Sphinx,
    page: str,
    template: str,
    context: dict[str, Any],
    _doctree: object,
) -> None:
    """The menu of every page names pages: made of the titles alone it takes a fifth of the time that it takes when the
    headings and the names of each page, hundreds, are copied first and dropped then."""
    whole = context.get("toctree")
    env = app.env
    if whole is None:
        return
    if not hasattr(app, "titles"):
        app.titles = {name: titles(toc) for name, toc in env.tocs.items()}

    def toctree(**options: object) -> str:
        env.tocs, kept = app.titles, env.tocs
        try:
            return accessible.menu(whole(**options))
        finally:
            env.tocs = kept

    context["toctree"] = toctree


def translation(
    _app: Sphinx,
    page: str,
    _template: str,
    context: dict[str, Any],
    _doctree: object,
) -> None:
    """Whether the page has one: the template then shows the switch of languages."""
    context["has_translation"] = not is_english_only(page + ".md")
    if "body" in context:
        context["body"] = accessible.body(context["body"])


def titles(toc: nodes.bullet_list) -> nodes.bullet_list:
    """A page's table of contents, without what lies below its title but the pages that it leads to."""
    found = toc.copy()
    for item in toc.children:
        kept = item.copy()
        kept += item[0].deepcopy()
        if below := [
            tree.deepcopy() for tree in item.findall(addnodes.toctree)
        ]:
            kept += nodes.bullet_list("", *below)
        found += kept
    return found


def without_overloads(_app: Sphinx) -> None:
    """Pages show the signature with all options, not the overloads, which only tell types by return_lse."""
    analyzer = ModuleAnalyzer.for_module("tilewise.api")
    analyzer.analyze()
    analyzer.overloads.clear()


def load_translations(app: Sphinx) -> None:
    app.translations = (
        Translations(ROOT / FILE)
        if app.config.language == "zh_CN"
        else None
    )


def docstring(
    app: Sphinx,
    _what: str,
    name: str,
    described: object,
    _options: object,
    lines: list[str],
) -> None:
    translate = (
        partial(app.translations.translate, name)
        if app.translations
        else str
    )
    docstrings.process(described, lines, translate)


def signature(
    _app: Sphinx,
    _what: str,
    _name: str,
    _described: object,
    _options: object,
    arguments: str | None,
    result: str | None,
) -> tuple[str | None, str | None]:
    """Defaults that are no Python, or too long to read, as "..."."""
    if arguments is not None:
        arguments = docstrings.short_defaults(arguments)
    return arguments, result


def check_translations(app: Sphinx, env: BuildEnvironment) -> None:
    """A warning is an error, so a docstring without a translation stops the build."""
    if app.translations:
        shown = env.domaindata["py"]["objects"]
        for fault in app.translations.faults(shown):
            logging.getLogger(__name__).warning(fault)


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", without_overloads)
    app.connect("builder-inited", load_translations)
    app.connect("autodoc-process-docstring", docstring)
    app.connect("autodoc-process-signature", signature)
    app.connect("env-check-consistency", check_translations)
    app.connect("autodoc-skip-member", docstrings.skip)
    app.add_html_math_renderer("mathml", (formula, None), (formula, None))
    app.connect("html-page-context", translation)
    app.connect(
        "html-page-context", light_menu, priority=400
    )  # the theme draws it at 500
    app.add_search_language(Pairs)

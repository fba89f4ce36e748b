"""The site: `make docs` builds it from the Markdown files of the repository, without a network.

The source directory is the root of the repository, so that links between documents are the same
here and in a clone. A link to any other file becomes a download.
"""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from collections.abc import Iterator
from pathlib import Path

import sphinx.addnodes
from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

import jax_specdec

project = "jax_specdec"
author = "The jax_specdec authors"
copyright = author
release = version = jax_specdec.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
]
root_doc = "docs/index"
include_patterns = [
    "docs/*.md",
    "docs/api/*.md",
    "notebooks/*.ipynb",
    "benchmarks/*.md",
    "training/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["build", ".*", "tests", "**/__pycache__"]

# Documents

nb_execution_mode = "off"  # notebooks are committed as they ran
nb_code_prompt_show = "Set-up: show code cell {type}"
nb_code_prompt_hide = "Set-up: hide code cell {type}"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
pygments_style, pygments_dark_style = "friendly", "github-dark"
copybutton_prompt_text, copybutton_prompt_is_regexp = r">>> |\.\.\. ", True

# The reference

default_role = "code"
autodoc_default_options = {"members": True}
autodoc_member_order = "bysource"
toc_object_entries_show_parents = "hide"
autodoc_typehints = "signature"  # docstrings say shape and dtype, which types do not
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
napoleon_custom_sections = [("Attributes", "params_style")]
napoleon_use_rtype = False
autosummary_generate = False
maximum_signature_line_length = 80
nitpick_ignore_regex = [
    ("py:.*", r"(jax|numpy|np|os|pathlib|collections|typing)\..*"),  # other sites
    ("py:class", "Head"),  # a type variable
]

# The pages

html_theme = "sphinx_book_theme"
html_title = f"jax_specdec {version}"
html_favicon = "_static/icon.svg"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_search_scorer = str(Path(__file__).parent / "scorer.js")  # which pages come first
templates_path = ["_templates"]
html_additional_pages = {"index": "to_first_page.html"}
html_show_sourcelink = False
html_use_index = html_domain_indices = False  # the reference has tables
html_copy_source = False
html_context = {"default_mode": "auto"}
html_theme_options = {
    "show_toc_level": 2,
    "use_download_button": False,
    "use_fullscreen_button": False,
    "navigation_with_keys": False,
    "navbar_persistent": [],
    "footer_content_items": ["copyright"],
}


class LinkNames(SphinxPostTransform):
    """Makes a link of every public name in code type: `generate`, `sd.Drafts.from_dense`."""

    default_priority = 5  # before links are resolved

    def run(self, **kwargs: typing.Any) -> None:
        """Replace each literal that names something of the reference."""
        entries = dict(self._entries())
        for literal in list(self.document.findall(nodes.literal)):
            name = re.sub(r"\(.*\)$", "", literal.astext())
            name = name.removeprefix("sd.").removeprefix("lm.")
            full = entries.get(name) or entries.get(re.sub(r"^([A-Z]\w*)\.\w+$", r"\1", name))
            if full is None:
                continue
            if isinstance(literal.parent, sphinx.addnodes.download_reference):
                literal = literal.parent  # a name that leads to its source leads to its entry here
            elif self._is_linked(literal):
                continue
            link = sphinx.addnodes.pending_xref(
                "", refdomain="py", reftype="obj", reftarget=full, refexplicit=True, refwarn=True
            )
            link["refdoc"] = self.env.docname
            literal.replace_self(link)
            link += literal.children if isinstance(literal, nodes.reference) else literal

    def _entries(self) -> Iterator[tuple[str, str]]:
        """What may be written for each entry: `Drafts.from_flat`, `verify_flat`."""
        for full in self.env.get_domain("py").objects:
            name = full.removeprefix(f"{jax_specdec.__name__}.")
            yield name, full
            yield re.sub(r"^(lm\.formats|lm\.models|lm|grammar|testing)\.", "", name), full
            if name.startswith(("adapters.", "lm.models.foreign.")):
                module, function = name.split(".")[-2:]
                yield f"{module}.{function}", full
                yield function, full

    def _is_linked(self, node: nodes.Node) -> bool:
        parent = node.parent
        while parent is not None:
            if isinstance(parent, nodes.reference | sphinx.addnodes.pending_xref | nodes.title):
                return True
            parent = parent.parent
        return False


def link_public(
    app: Sphinx, env: typing.Any, node: nodes.Element, text: nodes.Element
) -> nodes.Node | None:
    """A type in a signature leads to its public name; a private one leads nowhere."""
    package, _, path = node["reftarget"].partition(".")
    if package != jax_specdec.__name__ or not path.startswith(("_src.", "lm.")):
        return None
    domain, page, name = env.get_domain("py"), node["refdoc"], path.rpartition(".")[2]
    doors = ("", "lm.", "lm.formats.", "lm.models.", "grammar.", "testing.")
    places = [f"{package}.{door}{name}" for door in doors]
    name = next((place for place in places if place in domain.objects), name)
    return domain.resolve_xref(env, page, app.builder, "obj", name, node, text) or text


def skip_field(
    app: Sphinx, what: str, name: str, thing: object, skip: bool, options: object
) -> bool | None:
    """Leave out fields, which the docstring of their class lists."""
    if type(thing).__name__ == "_tuplegetter" or isinstance(thing, dataclasses.Field):
        return True
    return None


def without_arguments(
    app: Sphinx, what: str, name: str, thing: object, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    """Leave out the arguments of what nobody calls: enumerations and protocols."""
    if isinstance(thing, enum.EnumMeta) or getattr(thing, "_is_protocol", False):
        return "", ""
    return None


def keep_prose(
    app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]
) -> None:
    """Hide what properties say from napoleon, which takes the words before a colon for a type."""
    if what != "property":
        return
    if lines:
        app.env.temp_data["prose"] = list(lines)
        lines.clear()
    else:
        lines[:] = app.env.temp_data.pop("prose", [])


def write_math(translator: typing.Any, node: nodes.Element) -> None:
    """Formulas as MathML, which needs no script from elsewhere."""
    block = isinstance(node, nodes.math_block)
    translator.body.append(tex2mathml(node.astext(), as_block=block))
    raise nodes.SkipNode


def setup(app: Sphinx) -> None:
    """Sphinx calls this."""
    app.add_post_transform(LinkNames)
    app.add_html_math_renderer("mathml", (write_math, None), (write_math, None))
    app.connect("missing-reference", link_public)
    app.connect("autodoc-skip-member", skip_field)
    app.connect("autodoc-process-signature", without_arguments)
    for priority in (400, 600):  # before napoleon, and after it
        app.connect("autodoc-process-docstring", keep_prose, priority)

"""A griffe extension: docstrings in Hugging Face's style, and names that the package loads on first use."""

import ast

import griffe
from docstrings import documented, find, to_markdown


class HuggingFaceDocstrings(griffe.Extension):
    def __init__(self):
        self.known = documented()

    def on_instance(self, *, obj, **kwargs):
        if obj.docstring is None:
            return

        def link(name):
            try:
                return find(name, obj.path, self.known)
            except KeyError:
                return name  # which leads nowhere: where this is shown, a strict build fails

        obj.docstring.value = to_markdown(obj.docstring.value, link)

    def on_package(self, *, pkg, **kwargs):
        for name, module in ast.literal_eval(str(pkg["_MODULES"].value)).items():
            pkg.set_member(name, griffe.Alias(name, f"{pkg.path}.{module}.{name}"))

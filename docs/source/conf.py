"""Sphinx configuration."""

project = "CPU staging for TorchFT's LocalSGD"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinxcontrib.mermaid"]
html_theme = "furo"
html_title = project
autodoc_typehints = "description"
# The class docstring says it all; __init__ has none of its own.
autoclass_content = "class"
highlight_language = "none"  # what follows a "::" is output

"""Sphinx configuration."""

project = "CPU staging for TorchFT's LocalSGD"
extensions = ["sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = project
autodoc_typehints = "description"
# The fields of a dataclass once, in one list, and not again as parameters and members.
autodoc_typehints_description_target = "documented"
napoleon_use_ivar = True
# The class docstring says it all; __init__ has none of its own.
autoclass_content = "class"
highlight_language = "none"  # what follows a "::" is output
html_static_path = ["_static"]
html_css_files = ["tables.css"]
html_show_copyright = False

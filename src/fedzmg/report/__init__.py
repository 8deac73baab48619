"""Pages, tables, figures and terminal views of results; nothing is trained here.

Imports point downwards::

    exports                 files of commands
    html   terminal         the page, and tables in the terminal
    figures   tables        every figure and table, made once
"""

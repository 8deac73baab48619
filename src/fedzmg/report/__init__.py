"""Pages, tables and figures of results; nothing is trained here.

Imports point downwards::

    exports                 files of commands
    html                    the page
    figures   tables        every figure and table, made once
"""

"""Pages, tables, figures and terminal views of what was trained; nothing is trained here.

Imports point downwards, and media do not know each other::

    exports                     files that several media go into
    html   plots   terminal     the media
    sheets                      tables as data
    results                     directories read back, and what they came to
    numbers, lettering, ...     how numbers are written, how wide words are
"""

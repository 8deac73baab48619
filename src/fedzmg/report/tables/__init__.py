"""Tables as data: the page, Markdown, LaTeX and CSV all show the same cells."""

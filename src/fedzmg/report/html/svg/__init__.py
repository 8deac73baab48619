"""Charts as small inline SVG: colours come from the page's style sheet, so they follow its theme.

Every chart carries a title and a description for those who do not see it. Lines differ in dashes,
not only in colour.
"""

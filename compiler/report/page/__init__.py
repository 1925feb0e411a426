"""A report as one HTML page that needs nothing else.

In: a Report
Out: a file: HTML with inline SVG, style and script
Nouns: Markup, panel
Mind: No network, no library, and no script for the main content: the script only adds what is convenient.
    The picture (`picture.js`) paints what the browser laid out. It knows boxes, borders, words and paths, no more: what
    else the style sheet comes to use has to be painted there too. A stroke without a length is not seen on a canvas.
    All text is escaped by `markup.py`, unless it was made there.
    A long program is summed up before it is drawn (`reroll.program.timeline_summary`), and no peak is lost by that.
"""

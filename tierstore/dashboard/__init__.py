"""A page to watch: what a server does, live, in a browser.

::

    server's stats ─ look() ─▶ Sample ─▶ feed.py ─▶ server-sent events ─▶ assets/page.js ─▶ the page
                               view.py   once a second, shared by all        draws, knows no daemon
                                         site.py: who may look; the documents

``tierstore serve`` shows one (``daemon/page.py`` makes its samples, ``daemon/http.py`` serves it), and so
does ``tierstore-engine serve``. They differ in what a sample says, and in nothing else.

There is no build step. The page is what lies in ``assets``: HTML, CSS and JavaScript as browsers read it, and
uPlot 1.6.32 (MIT, ``assets/uPlot-LICENSE``) for the plots: 51 KB, without dependencies, and new points do not
need a new plot.
"""

"""The dashboard: a live view of a server in a browser.

::

    server's stats ─ look() ─▶ Sample ─▶ feed.py ─▶ server-sent events ─▶ assets/page.js ─▶ the dashboard
                               view.py   once a second, shared by all        draws, knows no daemon
                                         site.py: access rules; the documents

``tierstore serve`` has a dashboard (``daemon/dashboard.py`` makes its samples, ``daemon/http.py`` serves it).
``tierstore-engine serve`` has one with other samples and the same code.

There is no build step. ``assets`` has HTML, CSS and JavaScript as browsers read them, and uPlot 1.6.32 (MIT,
``assets/uPlot-LICENSE``) for the plots. uPlot has 51 KB and no dependencies, and can add points without
redrawing a whole plot.
"""

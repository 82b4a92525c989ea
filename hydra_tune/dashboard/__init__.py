"""The web dashboard: a server that reads the database of studies, its pages, and reports of one file.

security.py   which requests are answered at all, and the headers of every answer
app.py        the application: routes put together
studies.py    routes of studies, trials.py of trials, devices.py of units and devices, live.py of events
charts.py     what charts show, computed from columns of trials
static/       pages: plain ES modules, no build step, nothing from elsewhere
"""

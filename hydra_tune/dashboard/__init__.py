"""The web dashboard: a server that reads the database of studies, its pages, and reports of one file.

security.py   checks every request, and sets the headers of every response
app.py        the application, which combines the routes
routes.py     routes that read; action_routes.py: routes that change something
live.py       events; pages.py: pages and files
answers.py    response models, filled by the *_answers.py modules
charts.py     chart data, computed from columns of trials
static/       pages: plain ES modules, no build step, nothing loaded from elsewhere
"""

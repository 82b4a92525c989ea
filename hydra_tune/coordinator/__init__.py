"""The coordinator of a search: settings, study, each trial's attempts, display and results."""

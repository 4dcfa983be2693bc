"""Case files opened for a learner: a sealed engine, a budget of runs, a form, a judge."""

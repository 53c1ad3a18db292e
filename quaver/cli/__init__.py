"""The command line: thin verbs over the rooms below, and what they show on a terminal.

Reading order: main.py (the verbs, exit codes), train.py, plan.py, report.py, doctor.py; console.py (streams,
errors), progress.py and lines.py (a run's progress on a terminal and in a log), plan_view.py.
"""

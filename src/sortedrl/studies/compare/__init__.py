"""`sortedrl compare`: train several arms with the same seeds, and compare them pair by pair.

study.py        the TOML file of a study, read and checked
grid.py         the arms that its tables name
runs.py         one `sortedrl train` process per run, several at once, resumable
outcomes.py     what a finished run leaves: one line of results.jsonl
paired.py       paired differences with intervals, samples-to-threshold with censoring
comparison.py   a study and its results, as the numbers of the page and of compare.json
page.py, text.py, progress.py    what a user sees
"""

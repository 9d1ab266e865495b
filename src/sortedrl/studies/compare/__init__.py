"""`sortedrl compare`: train several arms with the same seeds, and compare them pair by pair.

study.py         the TOML file of a study, read and checked
results.py       what a finished run leaves, and its line of results.jsonl
paired.py        paired differences with intervals, samples-to-threshold with censoring
comparison.py    a study and its results, as the numbers of the page and of compare.json
study_folder.py  a study in its folder: one `sortedrl train` process per missing run, then all is written
page.py          what a user sees
"""

"""Tuning: which settings of a spec are fastest on this machine, measured with short trainings (trials), one after the
other, in a detached process.

- candidates: the settings that are tried, by axis: those that do not change the result, and those that do slightly
- trial: the steps of a trial, and what they say about its speed and its losses
- search: axis by axis from the settings of the spec, keeping what is faster; a pure function of what the trials measure
- runner: the detached process, which runs the trials
- tuning: the scratch folder, and earlier results of the same spec
"""

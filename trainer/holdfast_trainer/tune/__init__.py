"""`tune`: what each setting buys on this model and machine, measured, and the settings to use.

::

    command.py    arguments, progress, exit status
    settings.py   what can be set; written to and read from YAML
    workload.py   a user's own model and data, as tune and diagnose need them
    search.py     batch sizes: doubling, then bisection; the learning-rate rule
    plan.py       which combinations are measured, and which one is chosen
    measure.py    steps of one combination, on all ranks together
    report.py     table, Markdown, plot, files
"""

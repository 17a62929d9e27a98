"""`python -m benchmarks.fit_prior`."""

import typer

from benchmarks.fit_prior.commands import main

typer.run(main)

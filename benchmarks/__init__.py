"""One script per question; each result is one file in ``results/`` with the settings inside it."""

"""Matchers: pure functions from `Statistics` to a `Matching`, each callable alone."""

"""Labels: the abstract domain of the interpretation, and what it writes down."""

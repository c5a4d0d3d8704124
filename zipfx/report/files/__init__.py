"""Files: what of a merge is written, and how a merge is made of it again."""

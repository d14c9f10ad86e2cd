"""Tasks: one file each, with its prompts, data and verifier."""

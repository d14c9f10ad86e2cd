"""The tasks whose answers are advantages, weights and losses: notebooks 03, 06, 09."""

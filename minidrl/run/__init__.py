"""What a run needs around the loop: command line, settings, checkpoints, folders, evaluation."""

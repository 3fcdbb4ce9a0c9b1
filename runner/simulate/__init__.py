"""The real scheduler over a machine that is made up: its own clock, its own cells, a cost for each step. No model, no waiting."""

"""The twin: the production scheduler driven by a clock instead of a model."""

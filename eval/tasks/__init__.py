"""The tasks of an evaluation: suites, the user's own tasks, and the settings they are asked with."""
